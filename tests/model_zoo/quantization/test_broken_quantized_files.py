"""Files that are broken or of another model are refused in a sentence that names a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.json_fields import ModelError
from model_zoo.quantization.readers.tensor_spec import tensor_name
from tests.support.quantization import stored_linears as stored
from tests.support.quantization.stored_files import NAME, read_file, write
from tests.support.quantization.stored_linears import StoredLinear

ROWS, COLUMNS = 24, 64
MAKERS: dict[str, Callable[..., StoredLinear]] = {
    "fp8": lambda r: stored.fp8(r, ROWS, COLUMNS),
    "int-quantized": lambda r: stored.int_quantized(r, ROWS, COLUMNS),
    "pack-quantized": lambda r: stored.pack_quantized(r, ROWS, COLUMNS, symmetric=False),
    "nvfp4": lambda r: stored.nvfp4(r, ROWS, COLUMNS, writer="modelopt"),
    "nvfp4-pack-quantized": lambda r: stored.nvfp4(r, ROWS, COLUMNS, writer="compressed-tensors"),
    "mxfp4": lambda r: stored.mxfp4(r, ROWS, COLUMNS, writer="gpt-oss"),
    "mxfp4-pack-quantized": lambda r: stored.mxfp4(r, ROWS, COLUMNS, writer="compressed-tensors"),
    "awq": lambda r: stored.awq(r, ROWS, COLUMNS),
    "gptq": lambda r: stored.gptq(r, ROWS, COLUMNS, symmetric=False, act_order=True),
}
OPTIONAL = {"weight_shape"}
TENSORS = [
    (name, suffix)
    for name, make in MAKERS.items()
    for suffix in make(np.random.default_rng(0)).tensors
]
SCALES = [(name, suffix) for name, suffix in TENSORS if "scale" in suffix]


def broken(name: str, suffix: str, change: Callable[[Tensor], Tensor | None]) -> StoredLinear:
    """The Linear with one tensor changed, or without it."""
    linear = MAKERS[name](np.random.default_rng(0))
    tensors = dict(linear.tensors)
    changed = change(tensors.pop(suffix))
    if changed is not None:
        tensors[suffix] = changed
    return dataclasses.replace(linear, tensors=tensors)


def refusal(directory: Path, linear: StoredLinear) -> str:
    write(directory, linear)
    with pytest.raises(ModelError) as error:
        read_file(directory, (ROWS, COLUMNS))
    message = str(error.value)
    assert "\n" not in message and message.count(": ") >= 1
    return message


@pytest.mark.parametrize(("name", "suffix"), TENSORS)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, suffix: str) -> None:
    linear = broken(name, suffix, lambda tensor: None)
    if suffix in OPTIONAL:
        write(tmp_path, linear)
        assert read_file(tmp_path, (ROWS, COLUMNS)) is not None
    else:
        message = refusal(tmp_path, linear)
        assert suffix in message and "is missing" in message


@pytest.mark.parametrize(("name", "suffix"), TENSORS)
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, name: str, suffix: str) -> None:
    def longer(tensor: Tensor) -> Tensor:
        return torch.zeros(5, *tensor.shape[1:]).to(tensor.dtype)

    message = refusal(tmp_path, broken(name, suffix, longer))
    assert suffix in message and "has shape [5" in message


@pytest.mark.parametrize(("name", "suffix"), TENSORS)
def test_a_tensor_of_another_dtype_is_named(tmp_path: Path, name: str, suffix: str) -> None:
    is_code = next(iter(MAKERS[name](np.random.default_rng(0)).tensors)) == suffix
    dtype = torch.int64 if is_code else torch.float64
    message = refusal(tmp_path, broken(name, suffix, lambda t: torch.zeros(t.shape, dtype=dtype)))
    assert f"{suffix} is {str(dtype).removeprefix('torch.')}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize(("name", "suffix"), SCALES)
def test_a_scale_that_cannot_be_is_refused(
    tmp_path: Path, name: str, suffix: str, value: float
) -> None:
    def fill(tensor: Tensor) -> Tensor:
        bad = tensor.clone()
        if bad.dtype == torch.uint8:
            return bad.fill_(255)  # NaN
        if bad.dtype == torch.float8_e4m3fn:
            codes = {0.0: 0, -1.0: 0xB8}.get(value, 127)  # of 0, -1 and NaN
            return bad.view(torch.uint8).fill_(codes).view(bad.dtype)
        return bad.fill_(value)

    integers = name in ("awq", "gptq", "pack-quantized", "int-quantized")
    linear = broken(name, suffix, fill)
    if integers and value == -1:  # AutoRound writes such
        write(tmp_path, linear)
        assert read_file(tmp_path, (ROWS, COLUMNS)) is not None
        return
    message = refusal(tmp_path, linear)
    assert message.startswith(f"{tensor_name(NAME, suffix)} has ")
    assert message.endswith("which no scale is: download the file again")


def test_a_scale_of_0_among_others_is_that_of_a_group_of_zeros(tmp_path: Path) -> None:
    def clear(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8)[0, 0] = 0
        return tensor

    write(tmp_path, broken("nvfp4", "weight_scale", clear))
    weight = read_file(tmp_path, (ROWS, COLUMNS))
    assert weight is not None and not weight.dequantize(torch.float32)[0, :16].any()


def test_groups_of_other_sizes_are_refused(tmp_path: Path) -> None:
    def uneven(g_idx: Tensor) -> Tensor:
        g_idx[g_idx == 1] = 0
        return g_idx

    message = refusal(tmp_path, broken("gptq", "g_idx", uneven))
    assert "g_idx does not have 32 columns in each group" in message


def test_a_weight_of_another_model_is_refused_by_its_shape(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, broken("pack-quantized", "weight_shape", lambda shape: shape.flip(0))
    )
    assert (
        f"weight_shape is [{COLUMNS}, {ROWS}], and the model needs [{ROWS}, {COLUMNS}]" in message
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_linear_of_another_size_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, MAKERS[name](np.random.default_rng(0)))
    with pytest.raises(ModelError, match=r"has shape .* is expected for a weight"):
        read_file(tmp_path, (ROWS * 2, COLUMNS))


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    write(tmp_path, MAKERS["awq"](np.random.default_rng(0)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged or cut short"):
        read_file(tmp_path, (ROWS, COLUMNS))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int16])
def test_a_dtype_that_no_format_has_is_refused(tmp_path: Path, dtype: Any) -> None:
    linear = broken("fp8", "weight", lambda tensor: torch.zeros(ROWS, COLUMNS).to(dtype))
    assert "supported are F64, F32, F16, BF16, F8_E4M3" in refusal(tmp_path, linear)


def test_a_weight_of_truth_values_is_refused(tmp_path: Path) -> None:
    """Files may have them, as masks of a model."""
    linear = broken("fp8", "weight", lambda tensor: torch.ones(ROWS, COLUMNS).bool())
    assert "weight is bool, which the quantization_config" in refusal(tmp_path, linear)


def test_a_directory_of_gguf_files_is_refused_by_that_name(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"only GGUF files \(model-Q4_K_M.gguf\)"):
        read_file(tmp_path, (ROWS, COLUMNS))
