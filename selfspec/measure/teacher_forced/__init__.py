"""Drafts judged token by token on given text, each read as a draft step reads it: without generating anything."""
