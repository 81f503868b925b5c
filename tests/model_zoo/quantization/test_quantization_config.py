"""What read_quantization makes of the fields of each method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_zoo.quantization.config import QuantizationConfig, StoredFormat, read_quantization
from model_zoo.quantization.stored_format import fp8_format
from tests.support.quantization.configs import AWQ, GPTQ, compressed, group

LAYER = "model.layers.3"
BLOCKS = fp8_format("block", (128, 128))
WEIGHT_BLOCKS = fp8_format("block", (128, 128), activation_bits=16)
ACTIVATIONS = {"type": "float", "num_bits": 8}
NVFP4 = StoredFormat(name="nvfp4", bits=4, strategy="group", group=16)
INT4 = StoredFormat(name="gptq", bits=4, strategy="group", group=128, zero_offset=1)


def read_json(
    directory: Path, values: dict[str, Any], file: str = "config.json"
) -> QuantizationConfig | None:
    (directory / file).write_text(json.dumps(values))
    return read_quantization(directory)


def read(directory: Path, values: dict[str, Any]) -> QuantizationConfig:
    """values: the quantization_config."""
    found = read_json(directory, {"quantization_config": values})
    assert found is not None
    return found


def test_a_model_without_quantization_has_none(tmp_path: Path) -> None:
    assert read_quantization(tmp_path) is None
    assert read_json(tmp_path, {"model_type": "qwen3", "quantization_config": None}) is None


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_config_json_has_it_at_the_top_or_in_the_text_model(tmp_path: Path, name: str) -> None:
    values = {name: {"quant_method": "fp8"}}
    for top in (values, {"text_config": values}):
        found = read_json(tmp_path, top)
        assert found is not None and found.otherwise == fp8_format("tensor")


@pytest.mark.parametrize(
    ("file", "values", "method"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "modelopt",
        ),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq"),
    ],
)
def test_older_tools_write_a_file_of_their_own(
    tmp_path: Path, file: str, values: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = read_json(tmp_path, values, file)
    assert found is not None and found.method == method
    assert found.path.name == file


def test_config_json_goes_before_the_other_files(tmp_path: Path) -> None:
    read_json(tmp_path, {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json")
    assert read(tmp_path, {"quant_method": "fp8"}).otherwise == fp8_format("tensor")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "float8_e4m3fn"}, BLOCKS),
        ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_format("tensor")),
        (GPTQ, INT4),
        (
            {**GPTQ, "bits": 8, "group_size": -1, "sym": False, "desc_act": True},
            StoredFormat(
                name="gptq", bits=8, strategy="channel", symmetric=False, act_order=True,
                zero_offset=1,
            ),
        ),
        (
            {**GPTQ, "checkpoint_format": "gptq_v2", "group_size": 32},
            StoredFormat(name="gptq", bits=4, strategy="group", group=32),
        ),
        (
            AWQ,
            StoredFormat(name="awq", bits=4, strategy="group", group=128, symmetric=False),
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False},
            StoredFormat(name="awq", bits=4, strategy="group", group=64),
        ),
        ({**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, INT4),
        (
            {**AWQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
            StoredFormat(name="awq", bits=4, strategy="group", group=128, symmetric=False),
        ),
        ({"quant_algo": "FP8"}, fp8_format("tensor")),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, WEIGHT_BLOCKS),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8_format("channel")),
        ({"quant_algo": "NVFP4", "group_size": 16}, NVFP4),
        ({"quant_algo": "W4A16_NVFP4"}, NVFP4),
        (
            {"quant_method": "mxfp4"},
            StoredFormat(name="mxfp4", bits=4, strategy="group", group=32),
        ),
        (
            compressed(group("Linear", group_size=32, strategy="group", symmetric=False)),
            StoredFormat(
                name="pack-quantized", bits=4, strategy="group", group=32, symmetric=False
            ),
        ),
        (
            compressed(group("Linear", num_bits=8, group_size=-1, strategy="channel")),
            StoredFormat(name="pack-quantized", bits=8, strategy="channel"),
        ),
        (
            compressed(
                group("Linear", type="float", num_bits=4, group_size=16, strategy="tensor_group"),
                format="nvfp4-pack-quantized",
            ),
            StoredFormat(name="nvfp4-pack-quantized", bits=4, strategy="group", group=16),
        ),
        (
            compressed(
                group("Linear", type="float", num_bits=4, group_size=32, strategy="group"),
                format="mxfp4-pack-quantized",
            ),
            StoredFormat(name="mxfp4-pack-quantized", bits=4, strategy="group", group=32),
        ),
        (
            compressed(
                group("Linear", type="float", num_bits=8, strategy="channel"),
                format="float-quantized",
            ),
            fp8_format("channel", activation_bits=16),
        ),
        (
            compressed(
                group(
                    "Linear", type="float", num_bits=8, strategy="block",
                    block_structure=[128, 128],
                ),
                format="float-quantized",
            ),
            WEIGHT_BLOCKS,
        ),
        (
            compressed(
                {
                    **group("Linear", type="float", num_bits=8, strategy="channel"),
                    "input_activations": ACTIVATIONS,
                },
                format="float-quantized",
            ),
            fp8_format("channel"),
        ),
        (
            compressed(
                group("Linear", num_bits=8, strategy="channel"), format="int-quantized"
            ),
            StoredFormat(name="int-quantized", bits=8, strategy="channel"),
        ),
    ],
)  # fmt: skip
def test_the_fields_say_how_a_linear_is_stored(
    tmp_path: Path, values: dict[str, Any], expected: StoredFormat
) -> None:
    assert read(tmp_path, values).stored(f"{LAYER}.self_attn.q_proj") == expected


def test_mixed_precision_takes_the_format_of_each_group(tmp_path: Path) -> None:
    fp8 = group(r"re:.*self_attn\..*", type="float", num_bits=8, strategy="channel")
    ints = group("Linear", num_bits=8, strategy="channel")
    ints["input_activations"] = {"type": "int", "num_bits": 8}
    named = {**group("model.layers.3.mlp.up_proj", group_size=32), "format": "pack-quantized"}
    found = read(tmp_path, compressed(ints, fp8, named, format="mixed-precision"))
    stored = {
        name: found.stored(f"{LAYER}.{name}")
        for name in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert stored == {
        "self_attn.k_proj": fp8_format("channel", activation_bits=16),
        "mlp.up_proj": StoredFormat(name="pack-quantized", bits=4, strategy="group", group=32),
        "mlp.down_proj": StoredFormat(
            name="int-quantized", bits=8, strategy="channel", activation_bits=8
        ),
    }


@pytest.mark.parametrize(
    ("activations", "bits", "zeros"),
    [
        ({"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}, 8, False),
        ({"type": "int", "num_bits": 8, "strategy": "tensor", "symmetric": False}, 8, True),
        ({"type": "int", "num_bits": 4, "strategy": "token", "symmetric": False}, 16, False),
        ({"type": "float", "num_bits": 8, "strategy": "token"}, 16, False),
    ],
)
def test_int8_weights_are_multiplied_by_int8_activations_only(
    tmp_path: Path, activations: dict[str, Any], bits: int, zeros: bool
) -> None:
    ints = group("Linear", num_bits=8, strategy="channel") | {"input_activations": activations}
    found = read(tmp_path, compressed(ints, format="int-quantized"))
    assert found.stored(f"{LAYER}.mlp.up_proj") == StoredFormat(
        name="int-quantized",
        bits=8,
        strategy="channel",
        activation_bits=bits,
        activation_zeros=zeros,
    )


def test_naive_quantized_holds_a_code_a_byte(tmp_path: Path) -> None:
    ints = group("Linear", num_bits=8, strategy="channel")
    floats = group("re:.*mlp.*", num_bits=8, type="float", strategy="channel")
    found = read(tmp_path, compressed(ints, floats, format="naive-quantized"))
    assert found.stored(f"{LAYER}.mlp.up_proj") == fp8_format("channel", activation_bits=16)
    expected = StoredFormat(name="int-quantized", bits=8, strategy="channel")
    assert found.stored(f"{LAYER}.self_attn.q_proj") == expected


def test_a_group_without_weights_is_not_quantized(tmp_path: Path) -> None:
    attention = {"targets": ["re:.*self_attn.*"], "weights": None}
    found = read(tmp_path, compressed(attention, group("Linear", group_size=32)))
    assert found.stored(f"{LAYER}.self_attn.q_proj") is None
    assert found.stored(f"{LAYER}.mlp.up_proj") is not None


def test_modelopt_lists_the_layers_of_mixed_precision(tmp_path: Path) -> None:
    layers = {
        "model.language_model.layers.3.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.language_model.layers.3.linear_attn.out_proj": {"quant_algo": "FP8"},
        "lm_head": {"quant_algo": "W4A16_NVFP4"},
    }
    values = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["mtp*"]}
    found = read(tmp_path, values)
    assert found.stored("lm_head") == NVFP4
    assert found.stored("model.language_model.layers.3.mlp.experts.17.up_proj") == NVFP4
    assert found.stored("model.layers.3.linear_attn.out_proj") == fp8_format("tensor")
    assert found.stored("model.language_model.layers.3.self_attn.q_proj") is None
    assert found.stored("mtp.layers.0.mlp.experts.17.up_proj") is None


def test_experts_of_an_fp8_checkpoint_may_be_nvfp4(tmp_path: Path) -> None:
    values = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"layers.3.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
    }
    found = read(tmp_path, values)
    assert found.stored("layers.3.ffn.experts.0.w1") == NVFP4
    assert found.stored("layers.3.attn.wq_a") == BLOCKS


def test_modelopt_with_a_quantized_cache_only_has_no_quantized_weights(tmp_path: Path) -> None:
    values = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert read_json(tmp_path, values, "hf_quant_config.json") is None


def test_gptq_takes_the_first_expression_of_dynamic_that_matches(tmp_path: Path) -> None:
    dynamic = {
        r"-:.*\.mlp\.gate$": {},
        r"+:.*\.3\..*down.*": {"bits": 8, "group_size": 64},
        r".*down.*": {"sym": False},
    }
    found = read(tmp_path, {**GPTQ, "dynamic": dynamic})
    assert found.stored(f"{LAYER}.mlp.gate") is None
    eight = StoredFormat(name="gptq", bits=8, strategy="group", group=64, zero_offset=1)
    assert found.stored(f"{LAYER}.mlp.down_proj") == eight
    other = found.stored("model.layers.4.mlp.down_proj")
    assert other is not None and not other.symmetric and other.bits == 4
    assert found.stored(f"{LAYER}.mlp.up_proj") == INT4


@pytest.mark.parametrize(
    "modules",
    [[["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]], ["self_attn.q_proj"]],
)
def test_gptq_quantizes_the_listed_modules_of_a_block_only(
    tmp_path: Path, modules: list[Any]
) -> None:
    found = read(tmp_path, {**GPTQ, "modules_in_block_to_quantize": modules})
    assert found.stored(f"{LAYER}.self_attn.q_proj") == INT4
    assert found.stored(f"{LAYER}.mlp.down_proj") is None


@pytest.mark.parametrize("lm_head", [True, False])
def test_gptq_quantizes_lm_head_if_it_says_so(tmp_path: Path, lm_head: bool) -> None:
    found = read(tmp_path, {**GPTQ, "lm_head": lm_head, "dynamic": {"lm_head": {}}})
    assert (found.stored("lm_head") is not None) == lm_head


def test_auto_round_has_settings_of_single_modules(tmp_path: Path) -> None:
    extra = {
        f"{LAYER}.mlp.gate": {"bits": 16},
        f"{LAYER}.mlp.up_proj": {"bits": 8, "group_size": 64},
        r"self_attn\..*_proj": {"bits": 16, "data_type": "float"},
    }
    values = {**GPTQ, "quant_method": "auto-round", "sym": True, "extra_config": extra}
    found = read(tmp_path, values)
    assert found.stored(f"{LAYER}.mlp.gate") is None
    assert found.stored(f"{LAYER}.self_attn.q_proj") is None
    assert found.stored(f"{LAYER}.mlp.down_proj") == INT4
    assert found.stored("lm_head") is None
    up = found.stored(f"{LAYER}.mlp.up_proj")
    assert up is not None and (up.bits, up.group) == (8, 64)


@pytest.mark.parametrize("blocks", ["model.layers,other", ["model.layers"]])
def test_auto_round_may_name_the_blocks_that_it_quantized(tmp_path: Path, blocks: Any) -> None:
    values = {**GPTQ, "quant_method": "auto-round", "block_name_to_quantize": blocks}
    found = read(tmp_path, values)
    assert found.stored(f"{LAYER}.mlp.up_proj") == INT4
    assert found.stored("model.visual.blocks.0.attn.qkv") is None
