"""KVGroup: layers that share one page table, and how a model's layers are cut into groups.

All groups take their pages from one pool of equal pages, and a page belongs to one group at a time,
so memory moves between groups with the load.  A page holds `page_size` tokens of up to `depth`
layers: of each layer of its group.  Layers with the same sliding window need the same positions and
are in the same groups.  Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention.spec import AttentionSpec

# Of the KV of a sequence of full length: padding that a cut with fewer groups may cost.  Each group
# is one more page table to fill in every step, and one more page to manage for the same tokens.
PADDING = 0.05


@dataclass(frozen=True, slots=True)
class KVGroup:
    """window: of all its layers, in positions; 0: they see all.  layers: indices in the model."""

    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model; `depth` layers fit into a page."""

    groups: tuple[KVGroup, ...]
    depth: int

    @classmethod
    def uniform(cls, num_layers: int) -> KVLayout:
        """One group of all layers, without a window."""
        return cls((KVGroup(0, tuple(range(num_layers))),), num_layers)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    def places(self) -> list[tuple[int, int]]:
        """Of each layer of the model: the index of its group, and its place in a page."""
        found = [(0, 0)] * self.num_layers
        for index, group in enumerate(self.groups):
            for place, layer in enumerate(group.layers):
                found[layer] = index, place
        return found


class UnequalLayers(ValueError):
    """The layers' KV have different shapes, which one pool cannot hold yet."""


def kv_layout(specs: Sequence[AttentionSpec], max_len: int) -> KVLayout:
    """Cut the layers of a model with sequences of up to max_len tokens into groups.

    Raises UnequalLayers if keys and values of layers have different shapes.
    """
    shapes = sorted({(spec.kv_heads, spec.head_dim) for spec in specs})
    if len(shapes) > 1:
        found = " and ".join(f"{heads} KV heads of {dim}" for heads, dim in shapes)
        raise UnequalLayers(
            f"layers have {found}: all layers of a model must have as many KV heads of the same "
            "head_dim: use a model whose layers do"
        )
    by_window: dict[int, list[int]] = {}
    for layer, spec in enumerate(specs):
        window = spec.window if spec.window < max_len else 0  # of all positions, if it is as long
        by_window.setdefault(window, []).append(layer)
    # Without a window first: of these, a prefix of the pages decides what can be cached.
    classes = sorted(by_window.items())
    depth = page_depth({window: len(layers) for window, layers in classes}, max_len)
    groups = [
        KVGroup(window, tuple(layers[first : first + depth]))
        for window, layers in classes
        for first in range(0, len(layers), depth)
    ]
    return KVLayout(tuple(groups), depth)


def page_depth(layers: dict[int, int], max_len: int) -> int:
    """How many layers a page holds; `layers`: their number by window.

    Of the cuts whose KV of a sequence of max_len tokens is within PADDING of the least, the one
    with the fewest groups; of these the one with the least KV.
    """

    def num_groups(depth: int) -> int:
        return sum(-(-count // depth) for count in layers.values())

    def cells(depth: int) -> int:
        return sum(
            -(-count // depth) * depth * min(window or max_len, max_len)
            for window, count in layers.items()
        )

    depths = range(1, max(layers.values()) + 1)
    least = min(map(cells, depths))
    fitting = [depth for depth in depths if cells(depth) <= (1 + PADDING) * least]
    return min(fitting, key=lambda depth: (num_groups(depth), cells(depth), depth))
