"""Triton kernels of a step's ends: its inputs and its sampling."""
