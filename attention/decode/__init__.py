"""Decode attention kernels: split-KV flash-decoding over paged KV."""
