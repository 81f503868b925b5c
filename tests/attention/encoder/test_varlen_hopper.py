"""The Hopper kernel for packed sequences against a float64 oracle, on a GPU and interpreted."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from attention.encoder.seqlens import Seqlens
from attention.encoder.varlen_hopper import varlen_hopper
from attention.encoder.varlen_hopper_config import (
    THREE_CONSUMERS,
    TWO_CONSUMERS,
    VarlenHopperConfig,
)
from tests.support.attention.encoder_oracle import ROUNDING, error, make_qkv, oracle
from tests.support.interpreter.gluon_interpreter import interpreted

CONFIGS = {"two": TWO_CONSUMERS, "three": THREE_CONSUMERS}
# One patch, tiles that are cut everywhere, whole tiles, many tiles of a program.
LENS = [(1,), (128, 256), (1, 130, 63, 1, 700, 257), (1000,) * 9, (4096, 2304)]
MODULES = (
    "attention.prefill.prefill_hopper_stages",
    "attention.encoder.varlen_hopper_tile",
    "attention.encoder.varlen_hopper",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_tiles_barriers_and_maths_hold_where_the_kernel_is_interpreted(
    head_dim: int, config: VarlenHopperConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three programs have several tiles each, of sequences of 1 to 3 blocks."""
    lens = (1, 300, 64, 129)
    qkv = make_qkv(lens, 2, head_dim, torch.float16, "cpu")
    with interpreted("_varlen_hopper", *MODULES):
        module = sys.modules[MODULES[-1]]
        monkeypatch.setattr(module, "_num_sms", lambda device: 3)
        out = module.varlen_hopper(qkv, Seqlens.of(lens, qkv.device), config=config)
    assert error(out, oracle(qkv, lens)) <= ROUNDING[torch.float16]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
@pytest.mark.parametrize("count", [1, 64, 129, 200])
def test_padding_changes_no_bit_where_the_kernel_is_interpreted(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 128 rows ends before it, at it and in it; the other is of padding alone."""
    qkv = make_qkv((256,), 2, 72, torch.float16, "cpu")
    with interpreted("_varlen_hopper", *MODULES):
        module = sys.modules[MODULES[-1]]
        monkeypatch.setattr(module, "_num_sms", lambda device: 3)
        alone = module.varlen_hopper(qkv[:count], Seqlens.of((count,), qkv.device))
        qkv[count:] = float("nan")
        seqlens = replace(Seqlens.of((count,), qkv.device), lens=(256,), padded=256)
        out = module.varlen_hopper(qkv, seqlens)
    assert torch.equal(out[:count], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [4, 64, 128, 132, 260, 384])
def test_padding_behind_the_last_sequence_changes_no_bit_of_it(count: int) -> None:
    qkv = make_qkv((384,), 16, 72, torch.bfloat16, "cuda")
    alone = varlen_hopper(qkv[:count], Seqlens.of((count,), qkv.device))
    qkv[count:] = float("nan")
    seqlens = replace(Seqlens.of((count,), qkv.device), lens=(384,), padded=384)
    assert torch.equal(varlen_hopper(qkv, seqlens)[:count], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("lens", LENS, ids=str)
def test_images_of_all_lengths_equal_the_oracle(
    lens: tuple[int, ...], head_dim: int, dtype: torch.dtype, config: VarlenHopperConfig
) -> None:
    qkv = make_qkv(lens, 4, head_dim, dtype, "cuda")
    out = varlen_hopper(qkv, Seqlens.of(lens, qkv.device), config=config)
    assert error(out, oracle(qkv, lens)) <= ROUNDING[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_rows_at_a_stride_are_read_where_they_are(config: VarlenHopperConfig) -> None:
    lens, size = (300, 77), 3 * 2 * 72
    wide = torch.full((377, size + 40), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, :size] = make_qkv(lens, 2, 72, torch.bfloat16, "cuda").flatten(1)
    qkv = wide[:, :size].unflatten(1, (3, 2, 72))
    out = varlen_hopper(qkv, Seqlens.of(lens, qkv.device), config=config)
    assert error(out, oracle(qkv, lens)) <= ROUNDING[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_an_image_has_the_same_bits_whatever_stands_beside_it(config: VarlenHopperConfig) -> None:
    """Not even NaN of one sequence reaches another."""
    lens, own = (90, 421, 700), slice(90, 511)
    qkv = make_qkv(lens, 16, 72, torch.bfloat16, "cuda")
    before = varlen_hopper(qkv, Seqlens.of(lens, qkv.device), config=config)
    qkv[: own.start], qkv[own.stop :] = float("nan"), float("nan")
    after = varlen_hopper(qkv, Seqlens.of(lens, qkv.device), config=config)
    alone = varlen_hopper(qkv[own], Seqlens.of((421,), qkv.device), config=config)
    assert torch.equal(before[own], after[own]) and torch.equal(before[own], alone)


@pytest.mark.gpu
def test_a_captured_graph_replays_the_same_bits() -> None:
    lens = (500, 1024)
    qkv = make_qkv(lens, 16, 72, torch.bfloat16, "cuda")
    seqlens = Seqlens.of(lens, qkv.device)
    expected = varlen_hopper(qkv, seqlens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_hopper(qkv, seqlens)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
