"""Random numbers that depend on (seed, position) alone, so that samples are batch-invariant.

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.  The counter
is (position, 0, 0, 0) and the key the seed's low and high half, as in Triton's `tl.rand`, so that
a kernel on the device computes the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # each holds 32 bits, so that a product of two does not overflow

MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
LOW = np.uint64(0xFFFF_FFFF)
HALF = np.uint64(32)
PREFETCH = 128  # numbers computed at once for a slot
ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> Words:
    """[4, N]: four random words for each of N counters."""
    # Two words in one array: with few counters, NumPy's calls cost more than the arithmetic.
    even, odd = np.stack([counter[0], counter[2]]), np.stack([counter[1], counter[3]])
    for keys in (np.stack(key) + ROUNDS * KEY_STEPS) & LOW:
        products = (even * MULTIPLIERS)[::-1]
        even = (products >> HALF) ^ odd ^ keys
        odd = products & LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[N] numbers in the open interval (0, 1), one for each seed and position."""
    zero = np.zeros(len(seeds), dtype=np.uint64)
    counter = (positions.astype(np.uint64) & LOW, zero, zero, zero)
    word = philox(counter, (seeds & LOW, seeds >> HALF))[0]
    return (word.astype(np.float64) + 0.5) * 2.0**-32


class UniformCache:
    """`uniform` by slot, computed for the next PREFETCH positions at once: for a few numbers the
    calls would take longer than all the rest of a greedy step."""

    def __init__(self, num_slots: int) -> None:
        self._blocks = np.full(num_slots, -1)
        self._numbers = np.empty((num_slots, PREFETCH))
        # Staggered, so that slots that started together do not all refill in the same step.
        self._shifts = np.arange(num_slots) * 37 % PREFETCH

    def reset(self, slot: int) -> None:
        """Discard the numbers of a slot whose seed changes."""
        self._blocks[slot] = -1

    def take(
        self, slots: NDArray[np.int64], seeds: NDArray[np.uint64], positions: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """[N]: uniform(seeds, positions); the slots [N] have had these seeds since their reset."""
        blocks, places = np.divmod(positions + self._shifts[slots], PREFETCH)
        stale = np.flatnonzero(self._blocks[slots] != blocks)
        if len(stale):
            refill = slots[stale]
            first = blocks[stale] * PREFETCH - self._shifts[refill]
            ahead = (first[:, None] + np.arange(PREFETCH)).reshape(-1)
            made = uniform(np.repeat(seeds[stale], PREFETCH), ahead)
            self._numbers[refill] = made.reshape(-1, PREFETCH)
            self._blocks[refill] = blocks[stale]
        return self._numbers[slots, places]
