"""Device side: batches into model inputs, state of slots, results."""
