"""The demonstration: an embedded model, and plain decoding and self-speculation measured side by side on it."""
