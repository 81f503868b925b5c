"""Products of few rows with a weight matrix, at the speed of memory."""
