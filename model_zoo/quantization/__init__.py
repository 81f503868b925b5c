"""Quantized checkpoints: what is stored, the readers of each format, and their weight schemes."""
