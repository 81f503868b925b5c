"""Models whose layers are divided among ranks compute what the whole ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_zoo.config import ModelError, read_config
from model_zoo.parallel.sharded_config import sharded_config
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import KINDS, write_checkpoint
from tests.support.parallel.thread_ranks import logits_of_ranks
from tests.support.quantization.quantized_models import (
    FORMATS,
    write_quantized,
    write_quantized_experts,
    write_quantized_hybrid,
)

TOKENS, CUTS = 40, [20, 21]
FEW_KINDS = ("qwen3", "qwen2-tied", "gpt2", "gemma2", "gpt-oss", "qwen2-moe", "qwen3-next")
FEW_FORMATS = ("fp8-tensor", "fp8-channel", "int4-g32-zeros", "awq", "gptq-zeros", "nvfp4")
ONE_KEY_HEAD = ("qwen3.5", "qwen3.5-moe", "qwen3.5-moe-text")
CPU = torch.device("cpu")


def few(names: tuple[str, ...], all_names: object) -> list[object]:
    """All names, of which those outside of `names` are slow."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.slow)
        for name in all_names  # type: ignore[attr-defined]
    ]


def assert_ranks_agree(directory: Path, size: int, tolerance: float = 5e-5) -> None:
    """Every rank has the same bits, which are the whole model's but for the order of sums."""
    config = read_config(directory)
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    model = load_model(config, directory, dtype=torch.float32, device=CPU)
    whole = PagedRow(model, config, torch.float32).feed_in_steps(tokens, CUTS)
    first, *others = logits_of_ranks(directory, size, tokens, CUTS)
    for other in others:
        assert torch.equal(first, other)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("kind", few(FEW_KINDS, [k for k in KINDS if k not in ONE_KEY_HEAD]))
def test_two_ranks_compute_the_logits_of_the_whole_model(kind: str, tmp_path: Path):
    write_checkpoint(kind, tmp_path)
    assert_ranks_agree(tmp_path, 2)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-one-kv-head"])
def test_ranks_that_outnumber_the_kv_heads_share_them(kind: str, tmp_path: Path):
    write_checkpoint(kind, tmp_path)
    assert_ranks_agree(tmp_path, 4)
    config = sharded_config(read_config(tmp_path), 3, 4)
    assert (config.num_kv_heads, config.shard.kv_copies) == (1, 2 if kind == "qwen3" else 4)


@pytest.mark.parametrize("name", few(FEW_FORMATS, [n for n in FORMATS if "act-order" not in n]))
def test_two_ranks_compute_the_logits_of_a_quantized_model(name: str, tmp_path: Path):
    write_quantized(tmp_path, name)
    # Activations of int8 W8A8 are rounded, with a scale for each rank's part of a row.
    assert_ranks_agree(tmp_path, 2, 0.15 if name.startswith("int8-row") else 5e-5)


# A rank has 64 of an expert's 128 inner values: half of a group of 128 columns, or of a block.
@pytest.mark.parametrize(
    "name",
    few(("fp8-block", "awq"), ["fp8-block", "fp8-channel", "awq", "nvfp4", "int4-g32-zeros"]),
)
def test_two_ranks_compute_the_logits_of_quantized_experts(name: str, tmp_path: Path):
    write_quantized_experts(tmp_path, name)
    assert_ranks_agree(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_two_ranks_compute_the_logits_of_a_quantized_hybrid(fused: bool, tmp_path: Path):
    write_quantized_hybrid(tmp_path, "fp8-channel", fused=fused)
    assert_ranks_agree(tmp_path, 2)


def test_columns_in_another_order_are_refused_by_the_layer_that_has_them(tmp_path: Path):
    write_quantized(tmp_path, "gptq-act-order")
    with pytest.raises(ModelError, match=r"o_proj is quantized in an order of its columns"):
        logits_of_ranks(tmp_path, 2, torch.tensor([1]), [])


def test_blocks_of_scales_are_not_cut_in_two(tmp_path: Path):
    write_quantized(tmp_path, "fp8-block")  # of 128 x 128; keys and values have 256 outputs
    with pytest.raises(ModelError, match=r"64 of its 256 outputs.*fewer ranks"):
        logits_of_ranks(tmp_path, 4, torch.tensor([1]), [])


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("qwen3", 3, "3 does not divide the 4 attention heads .* divide it: 2, 4"),
        ("mistral", 8, "8 does not divide the 4 attention heads"),
        ("qwen3.5-moe-text", 2, "2 does not divide the 1 key heads of a gated delta net"),
        ("glm4-moe-groups", 16, "16 does not divide the 4 attention heads"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused(
    kind: str, size: int, message: str, tmp_path: Path
):
    write_checkpoint(kind, tmp_path)
    with pytest.raises(ModelError, match=f"--tensor-parallel {size}: {message}"):
        sharded_config(read_config(tmp_path, images=True), 0, size)


def test_weights_of_another_model_are_named_with_their_whole_shape(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"intermediate_size": 96', '"intermediate_size": 98')
    )
    with pytest.raises(ModelError, match=r"\[96, 64\], config.json asks for \[98, 64\]"):
        logits_of_ranks(tmp_path, 2, torch.tensor([1]), [])
