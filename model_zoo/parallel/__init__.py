"""Tensor parallelism: what each rank has of a model, and how ranks add and gather."""
