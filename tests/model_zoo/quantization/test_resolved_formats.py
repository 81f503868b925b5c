"""The tensors that are in the files decide where the lists of the config say something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_zoo.checkpoint import Checkpoint
from model_zoo.json_fields import ModelError
from model_zoo.quantization.readers.registry import split_name
from model_zoo.quantization.readers.resolve import resolve
from tests.support.quantization import stored_linears as stored
from tests.support.quantization.stored_files import NAME, assert_reads, read_file, write
from tests.support.quantization.stored_linears import StoredLinear

ROWS, COLUMNS = 24, 64


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def fp8(strategy: str = "channel", **options: Any) -> StoredLinear:
    return stored.fp8(random(), ROWS, COLUMNS, strategy=strategy, **options)


def test_a_listed_linear_of_plain_weights_is_not_quantized(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.zeros(ROWS, COLUMNS, dtype=dtype)
        write(tmp_path, StoredLinear(fp8().config, {"weight": weight}, weight.double()))
        assert read_file(tmp_path, (ROWS, COLUMNS)) is None


@pytest.mark.parametrize(
    "linear",
    [
        fp8(config={"quant_method": "fp8", "modules_to_not_convert": ["down_proj"]}),
        stored.awq(random(), ROWS, COLUMNS),
        stored.gptq(random(), ROWS, COLUMNS),
        stored.pack_quantized(random(), ROWS, COLUMNS),
        stored.nvfp4(random(), ROWS, COLUMNS, writer="modelopt"),
    ],
    ids=["fp8", "awq", "gptq", "pack-quantized", "nvfp4"],
)
def test_an_excluded_linear_with_codes_is_quantized(tmp_path: Path, linear: StoredLinear) -> None:
    linear.config.setdefault("modules_to_not_convert", ["down_proj"])
    linear.config["ignore"] = [NAME]
    assert_reads(tmp_path, linear)


def test_e4m3_with_a_scale_is_fp8_without_any_config(tmp_path: Path) -> None:
    for linear in (fp8(), fp8("tensor"), stored.fp8(random(), 200, 300)):
        assert_reads(tmp_path, StoredLinear({}, linear.tensors, linear.weight))


@pytest.mark.parametrize("said", [None, [128, 128]])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_the_shape_of_a_scale_says_what_it_is_of(
    tmp_path: Path, said: list[int] | None, strategy: str
) -> None:
    linear = stored.fp8(random(), 256, 384, strategy=strategy)
    linear.config["weight_block_size"] = said
    assert_reads(tmp_path, linear)


def test_a_file_may_name_the_linears_of_another_tree(tmp_path: Path) -> None:
    linear = stored.pack_quantized(random(), ROWS, COLUMNS)
    linear.config["config_groups"]["group_0"]["targets"] = [NAME]
    assert_reads(tmp_path, linear, "model.language_model.layers.0.mlp.down_proj")


def test_nothing_is_read_of_static_scales_of_activations(tmp_path: Path) -> None:
    linear = fp8("tensor")
    extra = {"input_scale": torch.tensor(0.0), "activation_scale": torch.ones(3)}
    assert_reads(tmp_path, StoredLinear(linear.config, {**linear.tensors, **extra}, linear.weight))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight_scale": (torch.float32, (ROWS, 1))}, f"{NAME}.weight is missing"),
        (
            {"weight": (torch.int8, (ROWS, COLUMNS))},
            "weight is int8, which the quant",
        ),
        ({"weight": (torch.float8_e4m3fn, (ROWS, COLUMNS))}, "weight_scale is missing"),
        (
            {"weight": (torch.uint8, (ROWS, COLUMNS // 2))},
            "weight is uint8, which the quantization_config",
        ),
    ],
)
def test_tensors_that_make_no_weight_are_refused_by_name(
    tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(NAME, (ROWS, COLUMNS), None, tensors)


def test_a_tensors_name_is_that_of_a_linear_and_of_what_it_holds() -> None:
    assert split_name(f"{NAME}.weight_scale_inv") == (NAME, "weight_scale_inv")
    assert split_name(f"{NAME}.qweight") == (NAME, "qweight")
    assert split_name("a.experts.gate_up_proj_blocks") == ("a.experts.gate_up_proj", "_blocks")
    assert split_name("model.layers.0.self_attn.k_scale") is None
    assert split_name(f"{NAME}.bias") is None
    assert split_name("weight") is None


def test_a_checkpoint_holds_the_dtypes_of_all_formats(tmp_path: Path) -> None:
    linear = fp8("block", dtype=torch.float8_e8m0fnu)
    write(tmp_path, linear)
    for source in Checkpoint.open(tmp_path).sources.values():
        assert source.read().dtype == source.dtype
