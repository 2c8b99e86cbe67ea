"""Products of few rows and of weights in few bits. Nothing here knows of models."""
