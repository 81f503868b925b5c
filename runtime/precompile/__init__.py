"""Precompilation of Triton kernels, in a separate process, while PyTorch is imported."""
