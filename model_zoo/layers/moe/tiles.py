"""ExpertTiles: the sizes of the experts' kernels, on which no result depends but by rounding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from model_zoo.layers.moe.hopper.tiles import HopperTiles, hopper_candidates

if TYPE_CHECKING:
    from model_zoo.layers.moe.expert_stack import ExpertStack

# From the first number of tokens to the largest of FEW, no tokens are sorted: few_tokens.py.
FEW = 8
FEW_COLUMNS = 16  # in which those tokens are multiplied: the least that tensor cores take
# Numbers of tokens that are tuned; each covers smaller ones, and the last all that are larger.
BUCKETS = (1, 4, FEW, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of one of the two products, for rows of a tile that both share."""

    outputs: int  # rows of W; of the first product gates, and as many ups
    columns: int  # of K in a step: a multiple of 64, of 128 for weights of 4 bits
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Fields of two ProductTiles, flat, as the autotune cache stores them."""

    rows: int  # of a tile: tokens of one expert; FEW_COLUMNS where tokens are few
    gate_up_outputs: int
    gate_up_columns: int
    gate_up_warps: int
    gate_up_stages: int
    down_outputs: int
    down_columns: int
    down_warps: int
    down_stages: int

    @classmethod
    def of(cls, rows: int, gate_up: ProductTile, down: ProductTile) -> ExpertTiles:
        first = (gate_up.outputs, gate_up.columns, gate_up.warps, gate_up.stages)
        second = (down.outputs, down.columns, down.warps, down.stages)
        return cls(rows, *first, *second)

    @property
    def gate_up(self) -> ProductTile:
        return ProductTile(
            self.gate_up_outputs, self.gate_up_columns, self.gate_up_warps, self.gate_up_stages
        )

    @property
    def down(self) -> ProductTile:
        return ProductTile(self.down_outputs, self.down_columns, self.down_warps, self.down_stages)


Tiles = ExpertTiles | HopperTiles


class ExpertShape(Protocol):
    """What the choice of tiles needs to know of Experts."""

    all_experts: int  # of all ranks
    top_k: int
    is_batch_invariant: bool
    gate_up: ExpertStack
    down: ExpertStack

    @property
    def device(self) -> torch.device: ...

    @property
    def is_packed(self) -> bool: ...

    @property
    def is_float32(self) -> bool: ...


class TilesByTokens:
    """The tiles for each number of tokens: tuned ones, or the first of candidates()."""

    def __init__(self) -> None:
        self._tiles: dict[int, Tiles] = {}

    def set(self, tiles: Mapping[int, Tiles]) -> None:
        """Tiles by the largest number of tokens that they are for, of BUCKETS."""
        assert set(tiles) <= set(BUCKETS)
        self._tiles = dict(tiles)

    def update(self, tiles: Mapping[int, Tiles]) -> None:
        """Set those of some numbers of tokens, and keep the others."""
        self.set({**self._tiles, **tiles})

    def of(self, tokens: int, shape: ExpertShape) -> Tiles:
        place = min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)
        found = self._tiles.get(BUCKETS[place])
        if isinstance(found, HopperTiles) and not found.serves(tokens, shape.gate_up, shape.down):
            found = None
        return found or candidates(tokens, shape)[0]


FLOAT32 = ExpertTiles.of(16, ProductTile(32, 32, stages=2), ProductTile(32, 32, stages=2))
# One kind of instruction, wgmma, at every number of rows, and steps of one size: one order of
# summation.
INVARIANT = {
    16: ExpertTiles.of(16, ProductTile(64, 128), ProductTile(64, 128)),
    64: ExpertTiles.of(64, ProductTile(64, 128, 4, 3), ProductTile(64, 128, 4, 3)),
}
# By the rows of a tile.
PLAIN: dict[int, tuple[ExpertTiles, ...]] = {
    16: (
        ExpertTiles.of(16, ProductTile(32, 128, 4, 4), ProductTile(64, 128, 4, 4)),
        ExpertTiles.of(16, ProductTile(64, 128, 4, 4), ProductTile(128, 128, 4, 3)),
        ExpertTiles.of(16, ProductTile(64, 64, 4, 5), ProductTile(64, 64, 4, 5)),
    ),
    32: (
        ExpertTiles.of(32, ProductTile(64, 64, 4, 4), ProductTile(128, 64, 4, 4)),
        ExpertTiles.of(32, ProductTile(64, 128, 4, 3), ProductTile(64, 128, 4, 4)),
    ),
    64: (
        ExpertTiles.of(64, ProductTile(64, 64, 4, 4), ProductTile(128, 64, 4, 4)),
        ExpertTiles.of(64, ProductTile(64, 64, 8, 4), ProductTile(128, 64, 8, 4)),
    ),
    128: (
        ExpertTiles.of(128, ProductTile(64, 64, 8, 4), ProductTile(128, 64, 8, 4)),
        ExpertTiles.of(128, ProductTile(128, 64, 8, 3), ProductTile(128, 64, 8, 4)),
        ExpertTiles.of(128, ProductTile(64, 64, 4, 4), ProductTile(64, 64, 4, 4)),
    ),
}
FEW_PLAIN = (
    ExpertTiles.of(FEW_COLUMNS, ProductTile(32, 128, 4, 4), ProductTile(32, 256, 4, 3)),
    ExpertTiles.of(FEW_COLUMNS, ProductTile(16, 256, 4, 4), ProductTile(16, 256, 4, 3)),
    ExpertTiles.of(FEW_COLUMNS, ProductTile(16, 512, 4, 3), ProductTile(32, 128, 4, 4)),
    ExpertTiles.of(FEW_COLUMNS, ProductTile(64, 64, 4, 5), ProductTile(64, 128, 4, 4)),
)
# Products of 64 rows, which are those of 32 gates and ups, take dequantized weights from registers.
PACKED: dict[int, tuple[ExpertTiles, ...]] = {
    16: (
        ExpertTiles.of(16, ProductTile(32, 128, 4, 4), ProductTile(64, 128, 4, 4)),
        ExpertTiles.of(16, ProductTile(64, 128, 4, 3), ProductTile(64, 128, 4, 4)),
        ExpertTiles.of(16, ProductTile(32, 256, 4, 3), ProductTile(64, 256, 4, 3)),
    ),
    32: (
        ExpertTiles.of(32, ProductTile(32, 128, 4, 4), ProductTile(64, 128, 4, 4)),
        ExpertTiles.of(32, ProductTile(64, 128, 4, 3), ProductTile(64, 128, 4, 4)),
    ),
    64: (
        ExpertTiles.of(64, ProductTile(32, 128, 4, 3), ProductTile(64, 128, 4, 3)),
        ExpertTiles.of(64, ProductTile(64, 128, 8, 3), ProductTile(128, 128, 8, 3)),
    ),
    128: (
        ExpertTiles.of(128, ProductTile(64, 128, 8, 3), ProductTile(64, 128, 4, 3)),
        ExpertTiles.of(128, ProductTile(64, 128, 8, 3), ProductTile(128, 128, 8, 3)),
    ),
}
FEW_PACKED = (
    ExpertTiles.of(FEW_COLUMNS, ProductTile(32, 128, 4, 4), ProductTile(64, 128, 4, 4)),
    ExpertTiles.of(FEW_COLUMNS, ProductTile(64, 128, 4, 4), ProductTile(64, 128, 4, 4)),
    ExpertTiles.of(FEW_COLUMNS, ProductTile(32, 256, 4, 3), ProductTile(64, 256, 4, 3)),
    ExpertTiles.of(FEW_COLUMNS, ProductTile(32, 128, 4, 6), ProductTile(32, 128, 4, 5)),
)


# Of GPUs other than Hopper, whose tensor cores take sums and weights from registers, and which have
# as little as 99 KiB of shared memory.
OTHERS_INVARIANT = {
    16: ExpertTiles.of(16, ProductTile(32, 64, 4, 4), ProductTile(64, 64, 4, 4)),
    64: ExpertTiles.of(64, ProductTile(32, 64, 4, 4), ProductTile(64, 64, 4, 4)),
}
OTHERS_INVARIANT_PACKED = {
    16: ExpertTiles.of(16, ProductTile(32, 128, 4, 3), ProductTile(64, 128, 4, 3)),
    64: ExpertTiles.of(64, ProductTile(32, 128, 4, 2), ProductTile(64, 128, 4, 2)),
}
OTHERS_PLAIN = {rows: PLAIN[rows][:1] for rows in (16, 32, 64)}
OTHERS_PACKED = {rows: PACKED[rows][:1] for rows in (16, 32, 64)}
OTHERS_FEW = FEW_PLAIN[:2], FEW_PACKED[:2]


@cache
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9.0, for which the first tables are; a device without kernels is, too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def candidates(tokens: int, shape: ExpertShape) -> tuple[Tiles, ...]:
    """What to time for so many tokens, the default first."""
    found = _plain_candidates(tokens, shape)
    if shape.is_float32 or shape.is_batch_invariant or not _runs_hopper_kernels(shape.device):
        return found
    processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
    sizes = processors, tokens, shape.top_k, shape.all_experts
    return (*found, *hopper_candidates(*sizes, shape.gate_up, shape.down))


def _runs_hopper_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and is_hopper(device)


def _plain_candidates(tokens: int, shape: ExpertShape) -> tuple[ExpertTiles, ...]:
    """Those of plain Triton."""
    if shape.is_float32:
        return (FLOAT32,)
    each = tokens * shape.top_k / shape.all_experts  # tokens of an expert, if all get as many
    hopper = is_hopper(shape.device)
    if shape.is_batch_invariant:
        others = OTHERS_INVARIANT_PACKED if shape.is_packed else OTHERS_INVARIANT
        return ((INVARIANT if hopper else others)[16 if each <= 16 else 64],)
    if tokens <= FEW:
        plain, packed = (FEW_PLAIN, FEW_PACKED) if hopper else OTHERS_FEW
        return packed if shape.is_packed else plain
    plain, packed = (PLAIN, PACKED) if hopper else (OTHERS_PLAIN, OTHERS_PACKED)
    table = packed if shape.is_packed else plain
    fitting = [rows for rows in table if rows >= 1.25 * each] or [max(table)]
    least = fitting[0]
    others = (rows for rows in (least // 2, 2 * least) if rows in table)
    return (*table[least], *(table[rows][0] for rows in others))
