"""What models take in memory, and what is left for keys and values."""
