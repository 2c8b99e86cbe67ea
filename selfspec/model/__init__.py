"""What a stock model is made of: adapter, layer path of a pass, views that share every weight, checkpoint."""
