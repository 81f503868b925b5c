"""Device functions of the Hopper kernels that read packed weights."""
