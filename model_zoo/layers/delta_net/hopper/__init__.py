"""Kernels of gated delta nets for Hopper (sm_90), in Gluon."""
