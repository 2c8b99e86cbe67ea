"""Rows that join and leave a running batch: each is what `generate` would make of it alone."""
