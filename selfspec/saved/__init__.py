"""What folders of saved models call."""
