"""Formats of weights, one file each: how they are packed, multiplied by few rows, made dense again, and saved."""
