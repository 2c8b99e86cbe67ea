"""The shared KV cache: cursors, masks, recurrent states, and transfer to and from the caches of `transformers`."""
