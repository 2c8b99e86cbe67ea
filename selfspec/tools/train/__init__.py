"""Training drafts: the LayerSkip recipe, exit heads on a frozen base, and reduced vocabularies."""
