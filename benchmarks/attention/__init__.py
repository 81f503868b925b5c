"""Attention kernels and planners against peers and against the bandwidth of memory."""
