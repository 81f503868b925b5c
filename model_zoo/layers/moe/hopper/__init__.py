"""Experts of few tokens on Hopper: weights by TMA, codes converted on their way to tensor cores."""
