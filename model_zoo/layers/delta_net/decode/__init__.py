"""Rows of few tokens: from the input projections of a gated delta net to its output projection."""
