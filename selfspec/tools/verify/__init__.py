"""Verification on a model of one's own: drafting changes none of its tokens, and no distribution."""
