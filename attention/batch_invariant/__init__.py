"""Attention whose results do not depend on the batch: `--deterministic`."""
