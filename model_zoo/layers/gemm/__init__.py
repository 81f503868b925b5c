"""GEMMs of linear layers: skinny, split-K, fused SwiGLU, batch-invariant, and their autotuning."""
