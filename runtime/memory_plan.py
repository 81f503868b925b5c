"""MemoryPlan: what the device's memory goes to, and what to change if it is too little.

Keys and values get what is left of the share that may be used.  On a GPU the rest is measured: the
weights when they have their memory, what slots and planners keep when they are made, the working
memory by running the largest steps, graphs by capturing some.
"""

from __future__ import annotations

import math

from msgspec import Struct

GIB = 2**30
HEADROOM = 1.03  # in suggestions: what they change is measured when they are followed
MAX_MEMORY_SHARE = 0.98  # somebody else, the display or a driver, may want a little
TOKEN_STEPS = 64  # suggested token budgets are multiples of it
LIBRARY_BYTES = 600 * 2**20  # of a step's work: loaded kernels and workspaces, whatever its size


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Bytes.  `free` could be allocated before anything was, `share` of it may be used."""

    free: int
    share: float
    weights: int = 0
    state: int = 0  # slots, plans and buffers, which are kept from step to step
    work: int = 0  # of the largest steps
    graphs: int = 0

    @property
    def fixed(self) -> int:
        """All but keys and values."""
        return self.weights + self.state + self.work + self.graphs

    @property
    def for_kv(self) -> int:
        return max(0, int(self.free * self.share) - self.fixed)

    def lines(self, kv: int) -> list[tuple[str, int]]:
        """For the start report, with the keys and values that were allocated."""
        parts = [("weights", self.weights), ("state", self.state), ("work", self.work)]
        parts += [("graphs", self.graphs), ("KV", kv)]
        parts.append(("left", self.free - self.fixed - kv))
        return [(name, count) for name, count in parts if count]

    def explained(self) -> str:
        """Where the memory went, for an error."""
        parts = {"weights": self.weights, "state": self.state, "work of a step": self.work}
        parts["graphs"] = self.graphs
        taken = [f"less {name} {size(count)}" for name, count in parts.items() if count]
        share = f"--gpu-memory {self.share:g} of {size(self.free)}"
        return f"{', '.join([share, *taken])} leaves {size(self.for_kv)}"


def size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.{2 if unit == GIB else 1}f} {name}"
    return f"{count / 2**10:.1f} KiB"


def remedies(
    plan: MemoryPlan,
    needed: int,
    *,
    length_that_fits: int,
    batched_tokens: int,
    max_num_seqs: int,
) -> str:
    """What would make room for `needed` bytes of KV: those of three options that may do it alone.

    What smaller steps leave is only known when they are measured.
    """
    found: list[str] = []
    if length_that_fits >= 2:
        found.append(f"--max-model-len {length_that_fits}")
    missing = (plan.fixed + needed - plan.free * plan.share) * HEADROOM
    share = math.ceil(100 * (plan.fixed + needed * HEADROOM) / max(plan.free, 1)) / 100
    if plan.share < share <= MAX_MEMORY_SHARE:
        found.append(f"--gpu-memory {share:g}")
    one_of = "each of these makes" if len(found) > 1 else "this makes"
    sure = f"{one_of} it fit: {', '.join(found)}" if found else ""
    growing = plan.work - LIBRARY_BYTES  # with the tokens of a step
    tokens = int(batched_tokens * (growing - missing) / growing) if growing > 0 else 0
    tokens -= tokens % TOKEN_STEPS
    if tokens >= max(max_num_seqs, TOKEN_STEPS):
        smaller = f"smaller steps may do: --max-batched-tokens {tokens}"
        return f"{sure}; {smaller}" if sure else smaller
    if sure:
        return sure
    # All but weights and libraries comes of the size of steps.
    if plan.work and plan.weights + LIBRARY_BYTES + needed <= plan.free * plan.share:
        return (
            "fewer sequences and smaller steps may do: "
            f"--max-num-seqs {max(1, min(max_num_seqs // 4, 32))}, "
            f"--max-batched-tokens {max(TOKEN_STEPS, min(batched_tokens // 4, 2048))}"
        )
    others = "" if plan.weights > plan.free * MAX_MEMORY_SHARE else "--kv-dtype fp8_e4m3, "
    return (
        "no --max-model-len, --max-num-seqs, --max-batched-tokens or --gpu-memory changes that: "
        f"use {others}a smaller model or a device with more memory"
    )
