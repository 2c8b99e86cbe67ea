"""What selfspec runs on here, and what is slow about it."""
