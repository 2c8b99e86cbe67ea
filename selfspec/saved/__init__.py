"""Generate from folders of saved models."""
