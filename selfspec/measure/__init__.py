"""Measures what a draft costs and how often it is right."""
