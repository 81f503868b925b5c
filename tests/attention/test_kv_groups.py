"""Layers are cut into groups that share pages, with little padding and few groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.kv_groups import KVLayout, UnequalLayers, kv_layout, page_depth
from attention.kv_pool import FP8, KVPool
from attention.spec import AttentionSpec

CPU = torch.device("cpu")


def specs(*windows: int) -> list[AttentionSpec]:
    return [
        AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=1.0, window=window)
        for window in windows
    ]


def sizes(layout: KVLayout) -> list[tuple[int, int]]:
    return [(group.window, len(group.layers)) for group in layout.groups]


def test_a_model_of_one_kind_has_one_group_of_all_layers():
    assert kv_layout(specs(*[0] * 5), 100) == KVLayout.uniform(5)
    assert sizes(kv_layout(specs(*[4096] * 32), 32768)) == [(4096, 32)]


def test_a_window_that_no_sequence_exceeds_is_none():
    assert kv_layout(specs(0, 64, 0, 64), 64) == KVLayout.uniform(4)
    assert len(kv_layout(specs(0, 64, 0, 64), 65).groups) == 2


def test_layers_of_every_other_kind_are_two_groups():
    layout = kv_layout(specs(*[128, 0] * 12), 131072)
    assert sizes(layout) == [(0, 12), (128, 12)] and layout.depth == 12
    assert layout.groups[1].layers == tuple(range(0, 24, 2))
    assert layout.places()[:4] == [(1, 0), (0, 0), (1, 1), (0, 1)]


def test_ten_layers_without_a_window_and_52_with_one_are_seven_groups():
    kinds = [0 if layer % 6 == 5 else 1024 for layer in range(62)]
    layout = kv_layout(specs(*kinds), 32768)
    assert sizes(layout) == [(0, 10), *[(1024, 10)] * 5, (1024, 2)]


@given(
    st.dictionaries(
        st.sampled_from([0, 16, 128, 1024]), st.integers(1, 40), min_size=1, max_size=3
    ),
    st.sampled_from([32, 512, 32768]),
)
def test_no_other_cut_has_fewer_groups_and_little_more_kv(layers: dict[int, int], max_len: int):
    def kv(depth: int) -> int:
        return sum(
            -(-count // depth) * depth * min(window or max_len, max_len)
            for window, count in layers.items()
        )

    def groups(depth: int) -> int:
        return sum(-(-count // depth) for count in layers.values())

    chosen = page_depth(layers, max_len)
    least = sum(count * min(window or max_len, max_len) for window, count in layers.items())
    assert kv(chosen) <= 1.05 * least
    for depth in range(1, 41):
        assert groups(depth) >= groups(chosen) or kv(depth) > 1.05 * least


def test_layers_of_different_shapes_are_refused_by_name():
    other = AttentionSpec(heads=4, kv_heads=1, head_dim=16, scale=1.0)
    with pytest.raises(UnequalLayers, match="1 KV heads of 16 and 2 KV heads of 8"):
        kv_layout([*specs(0, 0), other], 100)


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_each_layer_has_its_own_part_of_its_groups_pages(dtype: torch.dtype):
    layout = kv_layout(specs(0, 8, 8, 8, 0), 64)
    assert layout.depth < 5
    kv = KVPool.allocate(
        layers=layout, pages=4, kv_heads=2, page_size=16, head_dim=8, dtype=dtype, device=CPU
    )
    assert len(kv.layers) == 5 and len(kv.k) == layout.depth
    owners = {(layer.group, layer.k.data_ptr()) for layer in kv.layers}
    assert len(owners) == 5, "two layers of a group share memory"
    assert [layer.group for layer in kv.layers] == [group for group, _ in layout.places()]
    if dtype == FP8:
        assert kv.k_scale is not None and kv.k_scale.shape == (5, 2)
        kv.k_scale[3] = 7
        assert kv.layers[3].k_scale is not None and (kv.layers[3].k_scale == 7).all()
