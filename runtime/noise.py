"""Random numbers that depend on (seed, position) alone, so that a batch cannot change a sample.

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.  The counter
is (position, 0, 0, 0) and the key the seed's low and high half, as in Triton's `tl.rand`, so that
a kernel on the device can draw the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # each holds 32 bits, so that a product of two does not overflow

MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW = np.uint64(0xFFFF_FFFF)
HALF = np.uint64(32)
ROUNDS = 10


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> Words:
    """[4, N]: four random words for each of N counters."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (second >> HALF) ^ c1 ^ k0, second & LOW
        c2, c3 = (first >> HALF) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack([c0, c1, c2, c3])


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[N] numbers in the open interval (0, 1), one for each seed and position."""
    zero = np.zeros(len(seeds), dtype=np.uint64)
    counter = (positions.astype(np.uint64) & LOW, zero, zero, zero)
    word = philox(counter, (seeds & LOW, seeds >> HALF))[0]
    return (word.astype(np.float64) + 0.5) * 2.0**-32
