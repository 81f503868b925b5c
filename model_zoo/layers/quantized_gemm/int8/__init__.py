"""Products of int8 weights and activations in int8 (W8A8)."""
