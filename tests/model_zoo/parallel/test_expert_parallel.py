"""--expert-parallel: ranks that have whole experts compute what one that has all does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from model_zoo.config import ModelError, read_config
from model_zoo.parallel.sharded_checkpoint import open_checkpoint
from model_zoo.parallel.sharded_config import sharded_config
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import MOE_KINDS, write_checkpoint
from tests.support.parallel.thread_ranks import logits_of_ranks
from tests.support.quantization.gpt_oss_model import write_gpt_oss
from tests.support.quantization.quantized_models import write_quantized_experts

TOKENS, CUTS = 40, [20, 21]
FEW_KINDS, FEW_FORMATS = ("gpt-oss", "qwen2-moe"), ("fp8-block", "nvfp4")
FORMATS = ("fp8-block", "fp8-channel", "awq", "nvfp4", "int4-g32-zeros")
KINDS = [kind for kind in (*MOE_KINDS, "qwen3-next") if kind != "qwen3-moe-some-layers"]  # has 5
CPU = torch.device("cpu")
Write = Callable[[Path], object]

CASES: dict[str, Write] = {kind: partial(write_checkpoint, kind) for kind in KINDS}
CASES |= {name: partial(write_quantized_experts, name=name) for name in FORMATS}
CASES["mxfp4"] = write_gpt_oss
FAST = (*FEW_KINDS, *FEW_FORMATS, "mxfp4")


def assert_ranks_agree(directory: Path, size: int) -> None:
    config = read_config(directory)
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    model = load_model(config, directory, dtype=torch.float32, device=CPU)
    whole = PagedRow(model, config, torch.float32).feed_in_steps(tokens, CUTS)
    first, *others = logits_of_ranks(directory, size, tokens, CUTS, expert_parallel=True)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_two_ranks_with_half_of_the_experts_compute_the_logits_of_the_whole_model(
    name: str, tmp_path: Path
):
    CASES[name](tmp_path)
    assert_ranks_agree(tmp_path, 2)


def test_experts_that_are_too_narrow_for_their_blocks_need_whole_ones(tmp_path: Path):
    """As those of Qwen3-235B-A22B-FP8 on 8 GPUs: a rank would have one and a half blocks of 128."""
    write_quantized_experts(tmp_path, "fp8-block", inner=384)
    message = r"begin at 192 of its 384 outputs.*: add --expert-parallel, by which a rank has whole"
    with pytest.raises(ModelError, match=message):
        logits_of_ranks(tmp_path, 2, torch.tensor([1]), [])
    assert_ranks_agree(tmp_path, 2)


def test_a_rank_reads_its_experts_and_no_other(tmp_path: Path):
    write_quantized_experts(tmp_path, "fp8-block")
    whole = read_config(tmp_path)
    found: list[set[str]] = []
    for rank in range(2):
        config = sharded_config(whole, rank, 2, expert_parallel=True)
        keys = open_checkpoint(tmp_path, config).sources
        found.append({key.split(".experts.")[1][0] for key in keys if ".experts." in key})
    assert found == [{"0", "1"}, {"2", "3"}]


def test_of_tensors_of_all_experts_a_rank_reads_its_part(tmp_path: Path):
    write_gpt_oss(tmp_path)
    whole = read_config(tmp_path)
    config = sharded_config(whole, 1, 2, expert_parallel=True)
    keys, every = (open_checkpoint(tmp_path, each).sources for each in (config, whole))
    stacked = [key for key in every if ".experts." in key]
    assert len(stacked) == 2 * 6
    for key in stacked:
        assert torch.equal(keys[key].read(), every[key].read()[2:])


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("qwen3", 2, "--expert-parallel: this qwen3 model has no experts"),
        ("gpt-oss", 4, r"4 does not divide the 6 experts .* sizes that divide it: 2"),
    ],
)
def test_a_model_without_experts_or_with_a_number_that_cannot_be_divided_is_refused(
    kind: str, size: int, message: str, tmp_path: Path
):
    write_checkpoint(kind, tmp_path)
    with pytest.raises(ModelError, match=message):
        sharded_config(read_config(tmp_path), 0, size, expert_parallel=True)


def test_where_the_inner_values_cannot_be_divided_whole_experts_are_the_remedy(tmp_path: Path):
    write_checkpoint("glm4-moe-groups", tmp_path)  # 40 inner values, 8 experts, 4 heads
    config = tmp_path / "config.json"
    text = config.read_text().replace('"moe_intermediate_size": 40', '"moe_intermediate_size": 42')
    config.write_text(text)
    with pytest.raises(
        ModelError, match=r"4 does not divide the 42 inner.*: add --expert-parallel"
    ):
        sharded_config(read_config(tmp_path), 0, 4)
