"""Constrained decoding: the grammar process, and the token masks it computes."""
