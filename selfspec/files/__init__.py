"""Files: JSON from anywhere is read safely, output is checked before work and written whole or not at all."""
