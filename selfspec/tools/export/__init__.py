"""The draft as a checkpoint of its own, for other engines."""
