"""The draft as a checkpoint of its own, for other engines, and what drafts in vLLM without a model."""
