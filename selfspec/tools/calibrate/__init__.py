"""Calibration: which draft is the fastest on this machine, measured once, kept in a profile, used by `draft="auto"`."""
