"""Methods and options that no reader understands are refused by file, field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_zoo.json_fields import ModelError
from model_zoo.quantization.config import read_quantization
from tests.support.quantization.configs import AWQ, GPTQ, compressed, group


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "bitsandbytes"}, '`quantization_config.quant_method` is "bitsandbytes"'),
        ({"quant_method": "gguf"}, 'is "gguf": this method is not supported: supported are fp8,'),
        ({"quant_method": "exl3"}, "use a repository of this model that is quantized by one of"),
        ({"bits": 4}, "`quantization_config.quant_method` is null"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, 'fmt` is "e5m2": supported: e4m3'),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive integers"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "a list of strings"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "two positive integers"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, 'quant_algo` is \\["FP8"\\]: supp'),
        ({**compressed(group("Linear")), "format": ["x"]}, 'format` is \\["x"\\]: supported'),
        (
            compressed(group("Linear", group_size=32, actorder="nonsense")),
            'actorder` is "nonsense": supported: group, dynamic, weight, static',
        ),
        ({**AWQ, "version": "gemv"}, '`quantization_config.version` is "gemv": only the packing'),
        ({**AWQ, "version": "gemv_fast"}, '"gemv_fast": only the packing `gemm`'),
        ({**AWQ, "version": "marlin"}, '"marlin": only the packing `gemm`'),
        ({**AWQ, "bits": 8}, "`quantization_config.bits` is 8: AWQ is supported with 4 bits only"),
        ({**AWQ, "backend": "llm-awq"}, 'backend` is "llm-awq": supported: autoawq'),
        ({**GPTQ, "bits": 3}, "bits` is 3: GPTQ is supported with 4 and 8 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, '"marlin": supported are gptq and gptq_v2: use'),
        ({**GPTQ, "is_marlin_format": True}, "weights repacked for Marlin: use a repository"),
        ({**GPTQ, "group_size": 0}, "group_size` is 0: a positive integer is expected"),
        ({**GPTQ, "dynamic": {"+:[": {}}}, "dynamic` is .*: not a regular expression"),
        ({**GPTQ, "dynamic": {".*": {"bits": 2}}}, "bits` is 2: GPTQ is supported with 4 and 8"),
        ({"quant_method": "gptq", "bits": 4}, "`quantization_config.group_size` is missing"),
        (
            {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            'packing_format` is "auto_round:llm_compressor": supported: auto_round:auto_gptq',
        ),
        (
            {**GPTQ, "quant_method": "auto-round", "data_type": "mx_fp"},
            'data_type` is "mx_fp": supported: int',
        ),
        ({"quant_algo": "MXFP8"}, 'quant_algo` is "MXFP8": supported are FP8,'),
        ({"quant_algo": "W4A8_AWQ"}, 'quant_algo` is "W4A8_AWQ": supported are FP8,'),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size` is 32: NVFP4 has groups of 16"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers` is null: MIXED_PRECISION needs"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT4"}}},
            r'quantized_layers\.a\.quant_algo` is "INT4"',
        ),
        (compressed(), "config_groups` is null: at least one group"),
        (
            compressed(group("Linear", num_bits=8, type="float"), format="mxfp8-quantized"),
            'format` is "mxfp8-quantized": supported are pack-quantized',
        ),
        (
            compressed(group("Linear"), format="marlin-24"),
            'format` is "marlin-24": supported are pack-quantized',
        ),
        (
            compressed(group("Linear", num_bits=3, group_size=32)),
            r"config_groups\.group_0\.weights\.num_bits` is 3: pack-quantized with type int: int "
            "of 4 bits or int of 8 bits",
        ),
        (compressed(group("Linear", strategy="attn_head")), 'strategy` is "attn_head"'),
        (compressed(group("re:(", group_size=32)), "targets` is .*: not a regular expression"),
        (
            compressed(
                group("Linear", type="float", num_bits=4, group_size=64),
                format="nvfp4-pack-quantized",
            ),
            "group_size` is 64: nvfp4-pack-quantized has groups of 16",
        ),
        (
            compressed(
                group("Linear", num_bits=8, strategy="channel", symmetric=False),
                format="int-quantized",
            ),
            "symmetric` is false: only symmetric int8 weights",
        ),
        (
            compressed(group("Linear"), transform_config={"config_groups": {"u": {}}}),
            "rotated weights are not supported",
        ),
        (
            compressed(group("Linear"), sparsity_config={"format": "sparse-24-bitmask"}),
            'sparsity_config.format` is "sparse-24-bitmask": sparse weights are not supported',
        ),
    ],
)
def test_what_no_reader_understands_is_refused_by_file_field_and_value(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization_config": values}))
    with pytest.raises(ModelError, match=message) as error:
        read_quantization(tmp_path)
    assert str(error.value).startswith(f"{path}: `quantization_config.")


@pytest.mark.parametrize(
    ("spelling", "reordered"),
    [("group", True), (True, True), ("dynamic", True), ("weight", False), (None, False)],
)
def test_spellings_of_the_order_of_columns(
    tmp_path: Path, spelling: object, reordered: bool
) -> None:
    values = compressed(group("Linear", group_size=32, actorder=spelling))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": values}))
    found = read_quantization(tmp_path)
    stored = found and found.stored("model.layers.0.mlp.up_proj")
    assert stored is not None and stored.act_order == reordered
