"""A `transformers` checkpoint in the folder `model`; its MODEL_CARD.md says what it is."""
