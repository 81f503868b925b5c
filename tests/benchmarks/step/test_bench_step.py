"""Steps that are timed: their rows' pages and states, and what they read at least."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from attention.kv_groups import KVGroup, KVLayout
from attention.kv_pool import KVPool
from attention.state_pool import StatePool
from benchmarks.step.step_parts import ExpertSizes, StepSizes, batch_of, sizes_of
from model_zoo.config import read_config
from model_zoo.registry import build
from runtime.scheduler.kv_cache.sequence_pages import NO_PAGE
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.w8a8_models import config_of

CPU, FP32 = torch.device("cpu"), torch.float32
TWO_GROUPS = KVLayout((KVGroup(0, (0, 2)), KVGroup(24, (1, 3))), 2)


def pool_of(layout: KVLayout, pages: int, states: int = 0) -> KVPool:
    found = None
    if states:
        found = StatePool.allocate(
            layers=1, states=states, conv=(8, 3), matrix=(1, 4, 4), conv_dtype=FP32,
            matrix_dtype=FP32, device=CPU,
        )  # fmt: skip
    return KVPool.allocate(
        layers=layout, pages=pages, kv_heads=1, page_size=16, head_dim=16, dtype=FP32, device=CPU,
        states=found,
    )  # fmt: skip


def test_a_row_has_a_page_of_each_group_but_behind_its_window():
    batch = batch_of([(1, 100), (3, 30)], pool_of(TWO_GROUPS, 14), 131, random.Random(0))
    assert batch is not None and batch.num_new_pages.tolist() == [7, 2]
    pages = batch.new_pages.reshape(-1, 2)
    assert pages[:7, 1].tolist().count(NO_PAGE) == 4, "the token at 99 sees 76 to 99"
    held = [page for page in batch.new_pages.tolist() if page != NO_PAGE]
    assert len(set(held)) == len(held) == 18 - 4


@pytest.mark.parametrize("states", [0, 2])
def test_a_row_has_a_state_where_the_model_has_states(states: int):
    pool = pool_of(KVLayout.uniform(1), 8, states)
    batch = batch_of([(1, 5), (1, 7)], pool, 131, random.Random(0))
    assert batch is not None and batch.state_slots.tolist() == list(range(states))


def test_there_is_no_batch_for_which_the_pool_is_too_small():
    rng, rows = random.Random(0), [(1, 40), (1, 40)]
    assert batch_of(rows, pool_of(KVLayout.uniform(1), 5), 131, rng) is None
    assert batch_of(rows, pool_of(TWO_GROUPS, 9), 131, rng) is None
    assert batch_of(rows, pool_of(KVLayout.uniform(1), 8, states=1), 131, rng) is None


def test_a_step_reads_the_weights_of_layers_and_head_once(tmp_path: Path):
    """Not the embedding, and no norms."""
    config = config_of("qwen3", tmp_path)
    model, pool = build(config, torch.float32, CPU), pool_of(KVLayout.uniform(3), 8)
    sizes = sizes_of(model, pool)
    matrices = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embedding" not in name
    }
    assert sizes.weight_bytes == 4 * sum(matrices.values()) and not sizes.experts
    assert sizes.gemms + sizes.head == sum(matrices.values())
    assert sizes.kv_bytes == 2 * 3 * 16 * 4, "3 layers of one head of 16 numbers"


def test_a_mixture_reads_the_experts_that_are_chosen(tmp_path: Path):
    write_checkpoint("qwen3-moe", tmp_path)
    model = build(read_config(tmp_path), torch.float32, CPU)
    sizes = sizes_of(model, pool_of(KVLayout.uniform(3), 8))
    first = sizes.experts[0]
    assert len(sizes.experts) == 3 and (first.count, first.top_k) == (8, 3)
    assert first.bytes_each == 4 * 3 * 64 * 48 and first.gemms == 3 * 3 * 64 * 48
    assert first.bytes_read(1) == pytest.approx(3 * first.bytes_each)
    assert first.bytes_read(1000) == pytest.approx(8 * first.bytes_each)


def test_a_floor_is_the_time_of_bytes_or_of_operations():
    experts = ExpertSizes(count=4, top_k=2, bytes_each=100e6, gemms=10**9)
    sizes = StepSizes(2 * 10**9, 1000, 10**9, 10**8, (experts,))
    assert sizes.floor_ms([(1, 50_000)], 1e12) == pytest.approx(2.0 + 0.2 + 0.05)
    many = sizes.floor_ms([(4000, 4000)], 1e12)
    assert many == pytest.approx(1000 * 2 * (4000 * 2e9 + 1e8) / 790e12)
