"""HopperTiles: the sizes of the Hopper kernels of experts, and which are tried."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from model_zoo.layers.gemm.implementations import IN_FLIGHT, units_in_flight
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.quantized_gemm.hopper.arguments import SYNC_ROWS
from model_zoo.quantization.quantized_weight import BITS

MAX_TOKENS = 8192  # above, rows of x in the order of experts would take much memory
UNIT_BYTES = 16 << 10  # of a warpgroup
HEIGHT = 64  # rows of W of a warpgroup
MAX_STAGES = 8
# Bytes of rings, by the programs that an SM holds; the rest is for barriers and the epilogue.
SHARED_BYTES = {1: 216 << 10, 2: 104 << 10, 3: 66 << 10}
WIDEST_ROWS = 128
WIDE_ROWS, WIDE_BYTES = 64, 200 << 10  # of more rows the epilogue takes 16 KiB
REGISTERS = {1: 168, 2: 128, 3: 80}  # of a thread, likewise
# KiB, in place of IN_FLIGHT, that are tried in a step: of GEMMs of 4 bits fewer are better there.
LESS_IN_FLIGHT = 48
MAX_SPLITS = 4  # of K: each has an output of its own to add


@dataclass(frozen=True, slots=True)
class Ring:
    """Of one product."""

    columns: int  # of a unit
    stages: int
    x_stages: int


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """kernel.py: compute capability 9.0."""

    rows: int  # tokens of an expert in a tile, a power of two from 8 to WIDEST_ROWS
    groups: int  # warpgroups that compute, 1 or 2
    programs: int  # of the device
    resident: int  # of an SM, 1 to 3
    sync: bool = False  # products of packed weights by mma.sync
    down_splits: int = 1  # of one token's second product: parts of K, with tiles of their own
    in_flight: int = IN_FLIGHT >> 10  # KiB of W that the programs of an SM ask for at once

    @property
    def registers(self) -> int:
        return REGISTERS[self.resident]

    def ring(self, bits: int, inputs: int) -> Ring:
        """For weights of so many bits and K = inputs: few columns beyond K, and wide units, of
        which those of x take no more room than those of weights."""
        widest = UNIT_BYTES * 8 // bits // HEIGHT
        least = max(1024 // bits, widest // 4)
        of_x = UNIT_BYTES * 2 // self.resident
        sizes = [size for size in (widest, widest // 2, widest // 4) if size >= least]
        sizes = [size for size in sizes if self.rows * size * 2 <= of_x] or sizes[-1:]
        columns = min(sizes, key=lambda size: -(-inputs // size) * size)
        x_stages = 3 if self.rows <= SYNC_ROWS and self.resident < 3 else 2
        of_w = self.groups * HEIGHT * columns * bits // 8
        room = SHARED_BYTES[self.resident] if self.rows <= WIDE_ROWS else WIDE_BYTES
        room -= x_stages * self.rows * columns * 2
        return Ring(columns, min(MAX_STAGES, max(0, room) // of_w), x_stages)

    def ahead(self, bits: int, inputs: int) -> int:
        """Units of a ring() that a program asks for at once."""
        ring = self.ring(bits, inputs)
        unit_bytes = self.groups * HEIGHT * ring.columns * bits // 8
        return units_in_flight(unit_bytes, ring.stages, self.resident, self.in_flight << 10)

    def for_steps(self, gate_up: ExpertStack, down: ExpertStack) -> list[HopperTiles]:
        """Tiles with the same compiled code, which are to be compared in a step, as
        NormingGemm.for_steps."""
        less = replace(self, in_flight=LESS_IN_FLIGHT)
        products = [(_bits(stack), stack.inputs) for stack in (gate_up, down)]
        differ = any(less.ahead(*product) < self.ahead(*product) for product in products)
        return [less] if differ else []

    def serves(self, tokens: int, gate_up: ExpertStack, down: ExpertStack) -> bool:
        """Whether these experts of 16-bit values are multiplied for so many tokens."""
        return tokens <= MAX_TOKENS and all(self._serves(stack) for stack in (gate_up, down))

    def _serves(self, stack: ExpertStack) -> bool:
        if stack.dtype.itemsize != 2 or stack.inputs % 8:  # rows of x are 16-byte aligned
            return False
        bits = 16
        if stack.packed is not None:
            from model_zoo.layers.quantized_gemm.skinny import multiplies

            scheme = stack.packed.scheme
            if not multiplies(scheme, stack.packed.columns):
                return False
            bits = BITS[scheme.kind]
        elif self.sync:
            return False
        ring = self.ring(bits, stack.inputs)
        return ring.stages >= ring.x_stages


def hopper_candidates(
    processors: int, tokens: int, top_k: int, experts: int, gate_up: ExpertStack, down: ExpertStack
) -> list[HopperTiles]:
    """What to try for so many tokens on a device of so many SMs."""
    each = tokens * top_k / experts  # tokens of an expert, if all get as many
    rows = next((rows for rows in (8, 16, 32) if rows >= 1.25 * each), 64)
    if each >= WIDEST_ROWS / 2:
        # Products bound them, and conversions, of which there are fewer the more rows share them.
        wide = [HopperTiles(size, 2, processors, 1) for size in (64, WIDEST_ROWS)]
        return [tiles for tiles in wide if tiles.serves(tokens, gate_up, down)]
    two, three = (rows, 1, 2 * processors, 2), (rows, 1, 3 * processors, 3)
    large = rows, 2, processors, 1
    found = [HopperTiles(*two), HopperTiles(*large)]
    if gate_up.packed is not None and rows <= SYNC_ROWS:
        found = [HopperTiles(*sizes, sync=True) for sizes in (two, three, large)]
        found.append(HopperTiles(*three))
    found = [tiles for tiles in found if tiles.serves(tokens, gate_up, down)]
    if tokens == 1 and gate_up.experts == experts:  # a part of them has lists of their tokens
        found += [
            replace(tiles, down_splits=_splits(tiles, top_k, down))
            for tiles in found
            if tiles.sync or down.packed is None  # wgmma of packed weights would spill registers
        ]
    return list(dict.fromkeys(found))


def _bits(stack: ExpertStack) -> int:
    """Of a stored weight."""
    return 16 if stack.packed is None else BITS[stack.packed.scheme.kind]


def _splits(tiles: HopperTiles, top_k: int, down: ExpertStack) -> int:
    """The parts of K by which programs have the most equal shares of one token's tiles.

    Two, for gpt-oss's three programs an SM, take 25.5 us a layer in place of 29.7 on an H200: 180
    tiles leave half of the programs idle.  The first product's sums would have to be added before
    the activation, which takes longer than it saves.
    """
    units = math.ceil(down.inputs / tiles.ring(_bits(down), down.inputs).columns)
    count = top_k * math.ceil(down.outputs / (HEIGHT * tiles.groups))
    tried = [s for s in range(1, MAX_SPLITS + 1) if units % s == 0]
    # The largest share of a program, in tiles of whole rows.
    return min(tried, key=lambda s: (math.ceil(count * s / tiles.programs) / s, s))
