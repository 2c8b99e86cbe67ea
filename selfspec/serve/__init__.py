"""Serving: rows that join and leave one running batch, and what stands before it."""
