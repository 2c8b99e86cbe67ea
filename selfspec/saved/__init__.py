"""A saved folder: how its model drafts, and what its `custom_generate/generate.py` calls."""
