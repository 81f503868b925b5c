"""What more devices would bring, for the fit report."""

from __future__ import annotations

from collections.abc import Callable

from runtime.config import ResolvedConfig

SUGGESTED = (2, 4, 8)
# The configuration with so many ranks; None if the model cannot be divided so, or does not fit.
WithRanks = Callable[[int], ResolvedConfig | None]


def ranks_head(ranks: int) -> list[str]:
    return [f"divided among {ranks} devices: what follows is of each"] if ranks > 1 else []


def two_ranks(resolved: ResolvedConfig, with_ranks: WithRanks) -> list[str]:
    """What a second device holds besides; resolved: with one."""
    found = with_ranks(2)
    if found is None or found.num_pages <= resolved.num_pages:
        return []
    return [f"  with --tensor-parallel 2, on two of them: {_tokens(found):,} tokens"]


def more_ranks(least: int, with_ranks: WithRanks) -> str:
    """The least number of devices, from `least` on, that hold the model, for an error message."""
    for more in SUGGESTED:
        found = with_ranks(more) if more >= least else None
        if found is not None:
            return f"; --tensor-parallel {more}, on {more} of them, holds {_tokens(found):,} tokens"
    return ""


def _tokens(resolved: ResolvedConfig) -> int:
    return resolved.kv_capacity.tokens(resolved.num_pages, resolved.max_model_len)
