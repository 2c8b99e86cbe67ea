"""Calibration: find the fastest draft on this machine once, and keep it in a profile for `draft="auto"`."""
