"""What the library of compressed-tensors writes is read as the library itself reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.quantization.stored_files import NAME, read_file, write
from tests.support.quantization.stored_linears import StoredLinear

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
ROWS, COLUMNS = 48, 128


def scales(weight: Tensor, shape: tuple[int, int], largest: float) -> Tensor:
    rows, groups = shape
    blocks = weight.view(rows, ROWS // rows, groups, COLUMNS // groups)
    return blocks.abs().amax((1, 3)) / largest


CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int], float]] = {
    "int4 groups": (
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, (ROWS, 4), 7,
    ),
    "int4 groups, zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        (ROWS, 4), 7,
    ),
    "int4 rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, (ROWS, 1), 7),
    "int8 groups": (
        "pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}, (ROWS, 2), 127,
    ),
    "int8 rows, zero points": (
        "pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False},
        (ROWS, 1), 127,
    ),
    "W8A8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (ROWS, 1), 127),
    "fp8 rows": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (ROWS, 1), 448,
    ),
    "fp8 tensor": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (1, 1), 448,
    ),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
        (3, 4), 448,
    ),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "scale_dtype": torch.float8_e4m3fn},
        (ROWS, 8), 6,
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
         "scale_dtype": torch.uint8},
        (ROWS, 4), 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_compressed_weight_is_read_as_the_library_reads_it(tmp_path: Path, case: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    name, args, shape, largest = CASES[case]
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    state = {"weight": weight, "weight_scale": scales(weight, shape, largest)}
    if name == "nvfp4-pack-quantized":
        state["weight_global_scale"] = 2688 / weight.abs().max().reshape(1)
        scale = state["weight_scale"] * state["weight_global_scale"]
        state["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
    if name == "mxfp4-pack-quantized":
        state["weight_scale"] = torch.exp2(state["weight_scale"].log2().ceil())
    if not args.get("symmetric", True):
        middle = 1 << (args["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-middle, middle, shape, dtype=torch.int8)
    library = BaseCompressor.get_value_from_registry(name)
    compressed = library.compress(dict(state), scheme)
    expected = library.decompress(dict(compressed), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}
    if name == "int-quantized":
        group["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    config = {
        "quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group},
    }  # fmt: skip
    write(tmp_path, StoredLinear(config, compressed, expected.double()), NAME)
    found = read_file(tmp_path, (ROWS, COLUMNS))
    assert found is not None
    # The library computes NVFP4 in bfloat16, with two roundings.
    rtol = 2**-7 if expected.dtype == torch.bfloat16 else 3e-7
    torch.testing.assert_close(found.dequantize(torch.float32), expected.float(), rtol=rtol, atol=0)
    # The weight is that which was compressed, and not only what both make of its codes.
    if args.get("symmetric", True):
        assert (found.dequantize(torch.float32) - weight).abs().max() < 0.6
