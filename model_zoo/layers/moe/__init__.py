"""Mixture-of-experts layers: routers, stacked experts, their kernels and tile sizes."""
