"""Split planners: how the KV of a step is cut into the work of a fixed number of programs."""
