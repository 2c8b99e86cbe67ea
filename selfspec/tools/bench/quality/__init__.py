"""What an arm's texts are worth, beside how fast they came: `selfspec bench --quality`."""
