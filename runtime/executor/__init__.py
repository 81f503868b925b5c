"""Device side: model inputs of a batch, per-slot state, outputs of a step."""
