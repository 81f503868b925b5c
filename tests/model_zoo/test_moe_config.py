"""The fields of config.json that describe a mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_zoo.config import ModelError, read_config
from model_zoo.moe_config import MoEConfig

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
QWEN3 = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
}


def read(directory: Path, fields: dict[str, object]) -> MoEConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    moe = read_config(directory).moe
    assert moe is not None
    return moe


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3, 5]),
        ({"mlp_only_layers": [0, 5]}, [1, 2, 3, 4]),
    ],
)
def test_layers_have_experts_where_the_two_fields_say_so(
    tmp_path: Path, fields: dict[str, object], layers: list[int]
):
    moe = read(tmp_path, QWEN3 | fields)
    assert [layer for layer in range(6) if moe.has_experts(layer)] == layers


def test_each_family_has_its_own_router_and_shared_expert(tmp_path: Path):
    qwen3 = read(tmp_path, {**QWEN3, "norm_topk_prob": True})
    assert qwen3.router.renormalize and qwen3.shared_size is None
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48}
    qwen2 = read(tmp_path, {**QWEN3, **shared})
    assert not qwen2.router.renormalize and qwen2.shared_size == 48 and qwen2.shared_gate
    mixtral = read(tmp_path, {**SHAPE, "model_type": "mixtral"})
    assert (mixtral.router.num_experts, mixtral.router.top_k) == (8, 2)
    assert mixtral.router.renormalize and mixtral.intermediate_size == 128


def test_the_number_of_experts_has_two_names(tmp_path: Path):
    renamed = {**QWEN3, "num_local_experts": 16}
    del renamed["num_experts"]
    assert read(tmp_path, renamed) == read(tmp_path, QWEN3)


def test_a_token_has_room_for_the_outputs_of_all_of_its_experts(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_config(tmp_path).mlp_values == 3 * 128 == 4 * (24 + 64) + 2 * 16
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "moe_intermediate_size": 40}))
    assert read_config(tmp_path).mlp_values == 4 * (40 + 64) + 2 * 16


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": None}, "`num_local_experts` is missing"),
        ({"num_experts": 2000}, "`num_experts` is 2000: at most 1024 experts"),
        ({"num_experts_per_tok": 17}, "`num_experts_per_tok` is 17: at most the 16 of"),
        ({"moe_intermediate_size": None}, "`moe_intermediate_size` is missing"),
        ({"mlp_only_layers": [6]}, r"`mlp_only_layers` is \[6\]: layers from 0 to 5"),
        ({"mlp_only_layers": "none"}, "`mlp_only_layers` .*layers from 0"),
        ({"norm_topk_prob": 1}, "`norm_topk_prob` is 1: true or false"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, fields: dict[str, object], words: str
):
    with pytest.raises(ModelError, match=words):
        read(tmp_path, QWEN3 | fields)
