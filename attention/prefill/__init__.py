"""Prefill attention kernels: FlashAttention-2 over paged KV."""
