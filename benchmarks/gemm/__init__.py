"""Matrix multiplications of few and of many rows."""
