"""Training of drafts: the LayerSkip recipe, exit heads and draft heads on a frozen base, and reduced vocabularies."""
