"""Attention of encoders: packed sequences, without a mask, without a KV cache."""
