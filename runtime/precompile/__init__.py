"""Compiling Triton kernels ahead, in a process of its own, while PyTorch is imported."""
