"""KV pages of sequences, on the host side: which page holds what, and which prefixes are cached."""
