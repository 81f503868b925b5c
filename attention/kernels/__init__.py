"""Triton kernels.  Each file's header says what it reads, writes and is bound by."""
