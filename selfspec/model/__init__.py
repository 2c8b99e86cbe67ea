"""Stock models: adapters, layer paths of passes, views that share every weight, and checkpoints."""
