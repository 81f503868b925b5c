"""From logits to tokens and log-probabilities, on CPU and GPU."""
