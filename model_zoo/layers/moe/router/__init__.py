"""Routers of experts: their product and the choice, one fused kernel of few tokens, an oracle."""
