"""Images of requests: their bytes, decoding in processes apart, sizes and tokens."""
