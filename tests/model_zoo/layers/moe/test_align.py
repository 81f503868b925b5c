"""The pairs by expert, and their tiles."""

from __future__ import annotations

import pytest
import torch

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.moe.align import align
from model_zoo.moe_config import MAX_EXPERTS


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "rows"),
    [(1, 1, 1, 16), (9, 3, 7, 16), (40, 8, 8, 32), (200, 2, 60, 16), (3000, 4, 5, 128)],
)
def test_every_pair_is_in_one_tile_of_its_expert(
    device: str, tokens: int, top_k: int, experts: int, rows: int
):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int()
    found = align(ids.to(device), experts, rows, num_arrivals=1001)
    counts = ids.flatten().long().bincount(minlength=experts)
    assert found.counts.tolist() == counts.tolist()
    for expert, count in enumerate(counts.tolist()):
        pairs = (ids.flatten() == expert).nonzero().flatten().tolist()
        assert found.pairs[expert, :count].tolist() == pairs
    expected = [
        tile * MAX_EXPERTS + expert
        for expert, count in enumerate(counts.tolist())
        for tile in range(-(-count // rows))
    ]
    num_tiles = int(found.num_tiles)
    assert num_tiles <= found.most_tiles
    assert found.tiles[:num_tiles].tolist() == expected
    assert not found.arrivals.any() and found.arrivals.numel() == 1001
    assert int(workspace(torch.device(device))[1].sum()) == 0


def test_experts_without_pairs_have_no_tile(device: str):
    ids = torch.full((20, 1), 3, dtype=torch.int32, device=device)
    found = align(ids, 6, 16, num_arrivals=0)
    assert found.counts.tolist() == [0, 0, 0, 20, 0, 0]
    assert int(found.num_tiles) == 2 and found.tiles[:2].tolist() == [3, MAX_EXPERTS + 3]


@pytest.mark.parametrize("tokens", [3, 40])
def test_pairs_of_experts_that_are_not_here_are_in_no_tile(device: str, tokens: int):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 9, generator=generator).topk(4).indices.int().clamp_max(3)
    ids[:2] = 3  # of none
    x = torch.randn(tokens, 70, generator=generator).to(device)
    found = align(ids.to(device), 3, 8, 0, x)
    own = (ids.flatten() < 3).nonzero().flatten()
    order = own[ids.flatten()[own].argsort(stable=True)]
    assert found.counts.tolist() == [int((ids == expert).sum()) for expert in range(3)]
    assert found.rows is not None
    assert torch.equal(found.rows.cpu()[: len(order)], x.cpu()[order // 4])
    number = int(found.num_tiles)
    assert number == sum(-(-count // 8) for count in found.counts.tolist())
    assert all(tile % MAX_EXPERTS < 3 for tile in found.tiles[:number].tolist())


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_rank_may_have_a_single_expert(device: str, tokens: int):
    ids = torch.ones(tokens, 2, dtype=torch.int32)  # of none
    ids[::3, 1] = 0
    x = torch.randn(tokens, 70).to(device)
    found = align(ids.to(device), 1, 8, 0, x)
    own = (ids.flatten() == 0).nonzero().flatten()
    assert found.counts.tolist() == [len(own)]
    assert found.pairs[0, : len(own)].tolist() == own.tolist()
    assert found.rows is not None and torch.equal(found.rows.cpu()[: len(own)], x.cpu()[own // 2])
    number = int(found.num_tiles)
    assert found.tiles[:number].tolist() == [
        tile * MAX_EXPERTS for tile in range(-(-len(own) // 8))
    ]


def test_no_tile_is_made_where_all_experts_are_elsewhere(device: str):
    ids = torch.full((5, 2), 4, dtype=torch.int32, device=device)
    found = align(ids, 4, 8, 0, torch.zeros(5, 16, device=device))
    assert int(found.num_tiles) == 0 and not found.counts.any()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "rows"), [(2, 1, 4, 8), (21, 3, 7, 8), (40, 8, 8, 16)]
)
def test_rows_of_x_are_sorted_by_expert(
    device: str, tokens: int, top_k: int, experts: int, rows: int
):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int()
    wide = torch.randn(tokens, 700, generator=generator).to(device)
    x = wide[:, :600]
    found = align(ids.to(device), experts, rows, 0, x)
    order = ids.flatten().argsort(stable=True)
    assert found.rows is not None and torch.equal(found.rows.cpu(), x.cpu()[order // top_k])
    assert found.tile_rows is not None and found.tile_counts is not None
    number = int(found.num_tiles)
    first, counts = found.tile_rows[:number].tolist(), found.tile_counts[:number].tolist()
    assert [sum(counts[:i]) for i in range(number)] == first and sum(counts) == tokens * top_k
    for tile, row, count in zip(found.tiles[:number].tolist(), first, counts, strict=True):
        mine = ids.flatten()[order[row : row + count]]
        assert 1 <= count <= rows and (mine == tile % MAX_EXPERTS).all()


@pytest.mark.parametrize("sorts", [False, True])
def test_all_lists_begin_at_multiples_of_16_bytes(sorts: bool):
    """Else Triton would compile the kernels that read them for other numbers of tokens again."""
    ids = torch.tensor([[0, 2], [1, 2], [0, 1]], dtype=torch.int32)
    found = align(ids, 3, 16, num_arrivals=5, x=torch.zeros(3, 8) if sorts else None)
    lists = [found.pairs, found.counts, found.tiles, found.num_tiles, found.arrivals]
    if sorts:
        assert found.tile_rows is not None and found.tile_counts is not None
        lists += [found.tile_rows, found.tile_counts]
    assert all(one.data_ptr() % 16 == 0 for one in lists)
