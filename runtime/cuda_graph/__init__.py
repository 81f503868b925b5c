"""Device side on a GPU: a whole step as one CUDA graph."""
