"""Triton kernels that sample tokens and compute log-probabilities."""
