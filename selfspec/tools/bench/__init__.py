"""The benchmark: ways to decode, side by side on the same prompts in one process, and what may be said of them."""
