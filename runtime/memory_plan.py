"""MemoryPlan: how the device's memory is divided, and which options to change if it is too small.

The KV cache gets what is left of the share that may be used.  On a GPU the rest is measured: the
weights and the state of slots and planners after their allocation, activations by running the
largest steps, CUDA graphs by capturing some.
"""

from __future__ import annotations

import math

from msgspec import Struct

GIB = 2**30
HEADROOM = 1.03  # in suggested values, whose effect is only estimated
MAX_MEMORY_SHARE = 0.98  # the display, a driver or another process may need a little
TOKEN_MULTIPLE = 64  # suggested token budgets are multiples of it
# Of the activations: loaded kernels and workspaces, whatever the size of a step.
LIBRARY_BYTES = 600 * 2**20


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Bytes.  `free` was free before the first allocation; `share` of it may be used."""

    free: int
    share: float
    weights: int = 0
    state: int = 0  # slots, plans and buffers, which persist between steps
    activations: int = 0  # peak of the largest steps, and workspaces
    graphs: int = 0
    sequence_states: int = 0  # recurrent states of sequences

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.state + self.activations + self.graphs + self.sequence_states

    @property
    def for_kv(self) -> int:
        return max(0, int(self.free * self.share) - self.fixed)

    def lines(self, kv: int, states: int = 0) -> list[tuple[str, int]]:
        """(name, bytes) for the start report; `kv`: the bytes allocated to the KV cache, `states`:
        to the recurrent states of sequences."""
        parts = [
            ("weights", self.weights),
            ("state", self.state),
            ("activations", self.activations),
        ]
        parts += [("graphs", self.graphs), ("KV", kv), ("states", states)]
        parts.append(("unused", self.free - self.fixed - kv - states))
        return [(name, count) for name, count in parts if count]

    def explain(self) -> str:
        """How the memory is divided, for an error message."""
        parts = {"weights": self.weights, "state": self.state, "activations": self.activations}
        parts |= {"graphs": self.graphs, "recurrent states": self.sequence_states}
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
    """The options that would each make room for `needed` bytes of KV, for an error message.

    The memory that smaller steps need is an estimate until it is measured.
    """
    found: list[str] = []
    if length_that_fits >= 2:
        found.append(f"--max-model-len {length_that_fits}")
    missing = (plan.fixed + needed - plan.free * plan.share) * HEADROOM
    share = math.ceil(100 * (plan.fixed + needed * HEADROOM) / max(plan.free, 1)) / 100
    if plan.share < share <= MAX_MEMORY_SHARE:
        found.append(f"--gpu-memory {share:g}")
    one_of = "each of these makes" if len(found) > 1 else "this makes"
    certain = f"{one_of} it fit: {', '.join(found)}" if found else ""
    growing = plan.activations - LIBRARY_BYTES  # with the tokens of a step
    tokens = int(batched_tokens * (growing - missing) / growing) if growing > 0 else 0
    tokens -= tokens % TOKEN_MULTIPLE
    if tokens >= max(max_num_seqs, TOKEN_MULTIPLE):
        smaller = f"smaller steps may do: --max-batched-tokens {tokens}"
        return f"{certain}; {smaller}" if certain else smaller
    if certain:
        return certain
    # All but weights and libraries depends on the size of steps.
    if plan.activations and plan.weights + LIBRARY_BYTES + needed <= plan.free * plan.share:
        return (
            "fewer sequences and smaller steps may do: "
            f"--max-num-seqs {max(1, min(max_num_seqs // 4, 32))}, "
            f"--max-batched-tokens {max(TOKEN_MULTIPLE, min(batched_tokens // 4, 2048))}"
        )
    others = "" if plan.weights > plan.free * MAX_MEMORY_SHARE else "--kv-dtype fp8_e4m3, "
    return (
        "no --max-model-len, --max-num-seqs, --max-batched-tokens or --gpu-memory changes that: "
        f"use {others}a smaller model or a device with more memory"
    )
