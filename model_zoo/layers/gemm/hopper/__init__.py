"""Kernels of GEMMs of few rows, and of gated ones of many, for Hopper (sm_90), in Gluon."""
