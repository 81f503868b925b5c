"""Every form of the lists that say which modules are not quantized."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from model_zoo.quantization.config import read_quantization
from model_zoo.quantization.name_patterns import NamePatterns, Plain

Q = "model.layers.3.self_attn.q_proj"
UP = "model.layers.3.mlp.up_proj"


@pytest.mark.parametrize(
    ("entry", "plain", "name", "expected"),
    [
        # Plain entries, by what they have to be.
        (Q, "name", Q, True),
        ("model.layers.3.self_attn", "name", Q, False),
        ("model.layers.3.self_attn", "components", Q, True),
        ("model.layers.3", "components", "model.layers.30.mlp.up_proj", False),
        ("gate", "components", "model.layers.3.mlp.gate", True),
        ("gate", "components", "model.layers.3.mlp.gate_proj", False),
        ("gate", "substring", "model.layers.3.mlp.gate_proj", True),
        ("visual", "substring", "model.visual.blocks.0.attn.qkv", True),
        ("visual", "components", "model.visual.blocks.0.attn.qkv", True),
        ("lm_head", "name", "language_model.lm_head", True),
        # Names of another tree.
        ("model.language_model.layers.3.self_attn.q_proj", "name", Q, True),
        (Q, "name", "model.language_model.layers.3.self_attn.q_proj", True),
        ("language_model.model.layers.3.self_attn*", "name", Q, True),
        ("model.language_model.layers.3.mlp", "components", UP, True),
        ("model.language_model.layers.4.mlp", "components", UP, False),
        # Names of projections that are joined.
        ("model.layers.3.self_attn.qkv_proj", "name", Q, True),
        ("model.layers.3.mlp.gate_up_proj", "name", UP, True),
        ("qkv_proj", "components", Q, True),
        ("gate_up_proj", "substring", UP, True),
        (r"re:.*mlp\.(gate|gate_up|down)_proj.*", "name", UP, True),
        ("gate_up_proj", "components", "model.layers.3.mlp.down_proj", False),
        # Regular expressions match from the start.
        ("re:.*self_attn.*", "name", Q, True),
        ("re:self_attn.*", "name", Q, False),
        (r"re:model\.layers\.[0-2]\.", "name", Q, False),
        (r"re:visual\..*", "name", "model.visual.blocks.0.attn.qkv", True),
        ("^lm_head$", "components", "lm_head", True),
        (r"model\.layers\.\d+\.mlp", "components", UP, True),
        # One that excludes all but the text model does not exclude it by another name.
        ("re:^(?!.*language_model).*", "name", "model.language_model.layers.3.mlp.up_proj", False),
        ("re:^(?!.*language_model).*", "name", "model.visual.merger.linear_fc1", True),
        # Wildcards match a whole name, or a module that holds it.
        ("model.layers.3.self_attn*", "name", Q, True),
        ("*.self_attn.*", "name", Q, True),
        ("*self_attn", "name", Q, True),
        ("model.layers.*.self_attn", "name", Q, True),
        ("model.layers.*.mlp.router", "name", Q, False),
        ("layers.*", "name", Q, True),
        ("*.attn.*", "name", Q, False),
        ("mtp*", "name", "mtp.layers.0.mlp.up_proj", True),
        ("model.layers.?.mlp.up_proj", "name", UP, True),
        # Class names.
        ("Linear", "name", Q, True),
        ("torch.nn.Linear", "name", Q, True),
        ("Embedding", "name", Q, False),
    ],
)  # fmt: skip
def test_an_entry_matches(entry: str, plain: Plain, name: str, expected: bool) -> None:
    assert NamePatterns.parse([entry], plain).match(name) == expected


def test_an_empty_list_matches_nothing() -> None:
    assert not NamePatterns.parse([], "components").match(Q)


def test_an_expression_that_is_none_is_an_error() -> None:
    with pytest.raises(re.error):
        NamePatterns.parse(["re:("], "name")


INT4 = {"type": "int", "num_bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "ignored_layers"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "modules_to_not_convert"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "modules_to_not_convert"),
        ({"quant_method": "mxfp4"}, "modules_to_not_convert"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ignore"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "exclude_modules"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
            },
            "ignore",
        ),
    ],
)
@pytest.mark.parametrize(
    "entry", [Q, "model.layers.3.self_attn*", r"re:.*\.3\.self_attn\..*", "*.self_attn.qkv_proj"]
)
def test_the_list_of_every_method_is_honoured(
    tmp_path: Path, values: dict[str, Any], field: str, entry: str
) -> None:
    for excluded in ([], ["other", entry]):
        config = {"quantization_config": {**values, field: excluded}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_quantization(tmp_path)
        assert found is not None
        assert (found.stored(Q) is None) == bool(excluded)
        assert found.stored(UP) is not None
