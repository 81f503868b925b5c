"""What attention kernels share, the KV write, and the FlashAttention-1 baseline."""
