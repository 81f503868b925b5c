"""GEMMs of weights and activations in fp8, by kernels of ours for Hopper."""
