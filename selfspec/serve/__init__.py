"""Serving: rows that join and leave one running batch, and the server in front of it."""
