"""Every format that is read gives the weight that its definition says, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_zoo.layers.quantized_gemm.packed_weight import pack, unpack_codes
from model_zoo.quantization.config import read_quantization
from model_zoo.quantization.readers.registry import READERS
from tests.support.quantization import stored_linears as stored
from tests.support.quantization.stored_files import NAME, assert_reads, write

CASES = {
    "fp8 blocks": lambda r: stored.fp8(r, 256, 384),
    "fp8 blocks, cut off": lambda r: stored.fp8(r, 200, 328),
    "fp8 blocks of 64": lambda r: stored.fp8(r, 128, 256, block=64),
    "fp8 blocks, bf16 scales": lambda r: stored.fp8(r, 200, 328, dtype=torch.bfloat16),
    "fp8 blocks, e8m0 scales": lambda r: stored.fp8(r, 200, 328, dtype=torch.float8_e8m0fnu),
    "fp8 blocks, bytes of e8m0": lambda r: stored.fp8(r, 200, 328, dtype=torch.uint8),
    "fp8 per tensor, scalar": lambda r: stored.fp8(r, 24, 64, strategy="tensor", scale_shape=()),
    "fp8 per tensor, one value": lambda r: stored.fp8(
        r, 24, 64, strategy="tensor", scale_shape=(1,)
    ),
    "float-quantized per row": lambda r: stored.fp8(
        r, 24, 64, strategy="channel", scale_name="weight_scale", dtype=torch.bfloat16,
        config=stored.compressed_config(
            "float-quantized", num_bits=8, type="float", strategy="channel"
        ),
    ),
    "float-quantized per tensor": lambda r: stored.fp8(
        r, 24, 64, strategy="tensor", scale_name="weight_scale", scale_shape=(1,),
        config=stored.compressed_config(
            "float-quantized", num_bits=8, type="float", strategy="tensor"
        ),
    ),
    "float-quantized blocks": lambda r: stored.fp8(
        r, 256, 256, scale_name="weight_scale",
        config=stored.compressed_config(
            "float-quantized", num_bits=8, type="float", strategy="block",
            block_structure=[128, 128],
        ),
    ),
    "ModelOpt FP8": lambda r: stored.fp8(
        r, 24, 64, strategy="tensor", scale_name="weight_scale", scale_shape=(),
        config={"quant_algo": "FP8", "ignore": ["lm_head"]},
    ),
    "ModelOpt FP8 per row": lambda r: stored.fp8(
        r, 24, 64, strategy="channel", scale_name="weight_scale", scale_shape=(24,),
        config={"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "ModelOpt FP8 blocks": lambda r: stored.fp8(
        r, 256, 384, scale_name="weight_scale", scale_shape=(2, 1, 3, 1),
        config={"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    ),
    "int4 groups": lambda r: stored.pack_quantized(r, 24, 128),
    "int4 groups, fp16 scales": lambda r: stored.pack_quantized(r, 24, 128, dtype=torch.float16),
    "int4 groups, zero points": lambda r: stored.pack_quantized(r, 24, 128, symmetric=False),
    "int4 rows": lambda r: stored.pack_quantized(r, 24, 128, group=None),
    "int4 rows, zero points": lambda r: stored.pack_quantized(
        r, 24, 128, group=None, symmetric=False
    ),
    "int4 cut off": lambda r: stored.pack_quantized(r, 21, 100, symmetric=False),
    "int4 with g_idx": lambda r: stored.pack_quantized(r, 24, 128, g_idx=True, symmetric=False),
    "int8 groups": lambda r: stored.pack_quantized(r, 24, 128, bits=8, group=64),
    "int8 rows, zero points": lambda r: stored.pack_quantized(
        r, 21, 100, bits=8, group=None, symmetric=False
    ),
    "W8A8 per row": lambda r: stored.int_quantized(r, 24, 64),
    "W8A8 per tensor": lambda r: stored.int_quantized(r, 24, 64, strategy="tensor"),
    "NVFP4 of ModelOpt": lambda r: stored.nvfp4(r, 24, 64, writer="modelopt"),
    "NVFP4 of compressed-tensors": lambda r: stored.nvfp4(r, 24, 64, writer="compressed-tensors"),
    "MXFP4 of gpt-oss": lambda r: stored.mxfp4(r, 24, 128, writer="gpt-oss"),
    "MXFP4 of compressed-tensors": lambda r: stored.mxfp4(r, 24, 128, writer="compressed-tensors"),
    "AWQ": lambda r: stored.awq(r, 24, 128),
    "AWQ, symmetric": lambda r: stored.awq(r, 24, 128, symmetric=True),
    "AWQ rows": lambda r: stored.awq(r, 24, 128, group=None),
    "GPTQ": lambda r: stored.gptq(r, 24, 128),
    "GPTQ rows": lambda r: stored.gptq(r, 24, 128, group=None),
    "GPTQ 8 bits": lambda r: stored.gptq(r, 24, 128, bits=8),
    "GPTQ zero points v1": lambda r: stored.gptq(r, 24, 128, symmetric=False),
    "GPTQ zero points v2": lambda r: stored.gptq(
        r, 24, 128, symmetric=False, version="gptq_v2"
    ),
    "GPTQ 8 bits, zero points v1": lambda r: stored.gptq(r, 24, 128, bits=8, symmetric=False),
    "GPTQ act-order": lambda r: stored.gptq(r, 24, 128, act_order=True),
    "GPTQ act-order, zero points": lambda r: stored.gptq(
        r, 24, 128, act_order=True, symmetric=False, bits=8
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_weight_of_its_definition(tmp_path: Path, case: str) -> None:
    assert_reads(tmp_path, CASES[case](np.random.default_rng(1)))


WHOLE_BLOCKS = [
    case
    for case, make in CASES.items()
    if make(np.random.default_rng(1)).weight.shape[1] % 128 == 0
]


@pytest.mark.parametrize("case", WHOLE_BLOCKS)
def test_what_is_read_can_be_packed_for_kernels(tmp_path: Path, case: str) -> None:
    weight = assert_reads(tmp_path, CASES[case](np.random.default_rng(1)))
    packed = pack(weight)
    assert packed.shape == weight.shape
    assert torch.equal(unpack_codes(packed.words, weight.kind), weight.codes)
    assert all(
        tensor.is_contiguous()
        for tensor in (packed.words, packed.scales, packed.zeros, packed.row_scales)
        if tensor is not None
    )


def test_every_format_has_a_case(tmp_path: Path) -> None:
    seen = set()
    for index, make in enumerate(CASES.values()):
        directory = tmp_path / str(index)
        directory.mkdir()
        write(directory, make(np.random.default_rng(1)))
        config = read_quantization(directory)
        assert config is not None
        found = config.stored(NAME)
        assert found is not None
        seen.add(found.name)
    assert seen == set(READERS)
