"""Linears as each checkpoint format stores them, with the weight they mean in float64.

Everything follows the formats' definitions by arithmetic on integers in numpy, and shares no code
with the readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits of a word, the lowest first


@dataclass(frozen=True)
class StoredLinear:
    config: dict[str, Any]  # the quantization_config
    tensors: dict[str, Tensor]  # by suffix
    weight: Tensor  # [N, K] float64


def decode_e4m3(codes: Array) -> Array:
    """OFP8 E4M3: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity."""
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent.astype(np.float64) - 7)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def decode_e2m1(codes: Array) -> Array:
    """A sign, 2 bits of exponent with bias 1, 1 bit of mantissa."""
    sign = np.where(codes >> 3, -1.0, 1.0)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = (1 + mantissa / 2) * np.exp2(exponent.astype(np.float64) - 1)
    return sign * np.where(exponent == 0, mantissa / 2, normal)


def pack(values: Array, bits: int) -> Array:
    """[..., n] below 2^bits -> [..., n * bits / 32] int32, the first value at the lowest bits."""
    per_word = 32 // bits
    pad = -values.shape[-1] % per_word
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, pad)])
    grouped = values.astype(np.uint64).reshape(*values.shape[:-1], -1, per_word)
    words = sum(grouped[..., i] << np.uint64(bits * i) for i in range(per_word))
    return np.asarray(words).astype(np.uint32).view(np.int32)


def _torch(array: Array, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if dtype is None else tensor.to(dtype)


def _bits(codes: Array, dtype: torch.dtype) -> Tensor:
    return _torch(codes.astype(np.uint8)).view(dtype)


def _scales(random: Generator, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Array]:
    """Positive scales, and the same in float64 as the dtype holds them."""
    tensor = _torch(random.uniform(0.002, 0.02, shape)).to(dtype)
    return tensor, tensor.double().numpy()


def _e4m3_codes(random: Generator, shape: tuple[int, ...]) -> Array:
    codes = random.integers(0, 256, shape)
    return np.where(codes & 127 == 127, 0, codes)  # that is NaN


def _spread(values: Array, shape: tuple[int, int], down: int, across: int) -> Array:
    """One value a block of down x across -> one an element."""
    wide = np.repeat(np.repeat(values, down, 0), across, 1)
    return wide[: shape[0], : shape[1]]


def fp8(
    random: Generator,
    rows: int,
    columns: int,
    *,
    strategy: str = "block",
    scale_name: str = "weight_scale_inv",
    scale_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
    block: int = 128,
) -> StoredLinear:
    """strategy: tensor, channel or block; scale_shape: another one for the same numbers."""
    down, across = {
        "tensor": (rows, columns), "channel": (1, columns), "block": (block, block),
    }[strategy]  # fmt: skip
    shape = (-(-rows // down), -(-columns // across))
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = random.integers(115, 125, shape)
        scale, values = _bits(exponents, dtype), np.exp2(exponents - 127.0)
    else:
        scale, values = _scales(random, shape, dtype)
    codes = _e4m3_codes(random, (rows, columns))
    weight = decode_e4m3(codes) * _spread(values, (rows, columns), down, across)
    default = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if strategy == "tensor" else "dynamic",
        "weight_block_size": [block, block] if strategy == "block" else None,
    }
    return StoredLinear(
        config or default,
        {
            "weight": _bits(codes, torch.float8_e4m3fn),
            scale_name: scale.reshape(shape if scale_shape is None else scale_shape),
        },
        torch.from_numpy(weight),
    )


def compressed_config(name: str, **weights: Any) -> dict[str, Any]:
    """One group for all Linears; weights: its fields."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def pack_quantized(
    random: Generator,
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    g_idx: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> StoredLinear:
    middle, across = 1 << (bits - 1), group or columns
    groups = -(-columns // across)
    codes = random.integers(0, 1 << bits, (rows, columns))
    zeros = np.full((rows, groups), middle)
    if not symmetric:
        zeros = random.integers(0, 1 << bits, (rows, groups))
    scale, values = _scales(random, (rows, groups), dtype)
    group_of = np.arange(columns) // across
    if g_idx:
        group_of = random.permutation(group_of)
    weight = (codes - zeros[:, group_of]) * values[:, group_of]
    tensors = {
        "weight_packed": _torch(pack(codes, bits)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _torch(pack(zeros.T, bits).T)
    if g_idx:
        tensors["weight_g_idx"] = _torch(group_of, torch.int32)
    config = compressed_config(
        "pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group is None else "group",
        group_size=group,
        actorder="group" if g_idx else None,
    )
    return StoredLinear(config, tensors, torch.from_numpy(weight))


def int_quantized(
    random: Generator,
    rows: int,
    columns: int,
    *,
    strategy: str = "channel",
    activation_zeros: bool = False,
) -> StoredLinear:
    codes = random.integers(-128, 128, (rows, columns))
    scale, values = _scales(random, (rows if strategy == "channel" else 1, 1), torch.bfloat16)
    config = compressed_config("int-quantized", num_bits=8, type="int", strategy=strategy)
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8,
        "type": "int",
        "strategy": "token",
        "dynamic": True,
        "symmetric": not activation_zeros,
    }
    tensors = {"weight": _torch(codes, torch.int8), "weight_scale": scale}
    return StoredLinear(config, tensors, torch.from_numpy(codes * values))


def _fp4_codes(random: Generator, rows: int, columns: int) -> tuple[Array, Tensor]:
    """-> (codes [N, K], bytes [N, K / 2], the even column at the low bits)."""
    codes = random.integers(0, 16, (rows, columns))
    return codes, _torch((codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8))


def nvfp4(random: Generator, rows: int, columns: int, *, writer: str) -> StoredLinear:
    """writer: modelopt, or compressed-tensors, whose second scale divides."""
    codes, packed = _fp4_codes(random, rows, columns)
    scale_codes = random.integers(1, 127, (rows, columns // 16))
    second = torch.tensor(random.uniform(0.001, 0.01), dtype=torch.float32)
    weight = decode_e2m1(codes) * np.repeat(decode_e4m3(scale_codes), 16, 1)
    scale = _bits(scale_codes, torch.float8_e4m3fn)
    if writer == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": second}
        return StoredLinear(config, tensors, torch.from_numpy(weight * second.double().item()))
    divisor = (1 / second).reshape(1)
    config = compressed_config(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
    return StoredLinear(config, tensors, torch.from_numpy(weight / divisor.double().item()))


def mxfp4(random: Generator, rows: int, columns: int, *, writer: str) -> StoredLinear:
    """writer: gpt-oss or compressed-tensors."""
    codes, packed = _fp4_codes(random, rows, columns)
    exponents = random.integers(110, 126, (rows, columns // 32))
    weight = decode_e2m1(codes) * np.repeat(np.exp2(exponents - 127.0), 32, 1)
    scale = _bits(exponents, torch.uint8)
    if writer == "gpt-oss":
        tensors = {"_blocks": packed.view(rows, columns // 32, 16), "_scales": scale}
        config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        return StoredLinear(config, tensors, torch.from_numpy(weight))
    config = compressed_config(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    )
    tensors = {"weight_packed": packed, "weight_scale": scale}
    return StoredLinear(config, tensors, torch.from_numpy(weight))


def awq(
    random: Generator,
    rows: int,
    columns: int,
    *,
    group: int | None = 32,
    symmetric: bool = False,
) -> StoredLinear:
    """rows: a multiple of 8."""
    across = group or columns
    groups = -(-columns // across)
    codes = random.integers(0, 16, (rows, columns))
    zeros = np.full((rows, groups), 8) if symmetric else random.integers(0, 16, (rows, groups))
    scale, values = _scales(random, (groups, rows), torch.float16)
    weight = (codes - _spread(zeros, codes.shape, 1, across)) * _spread(
        values.T, codes.shape, 1, across
    )

    def packed(values: Array) -> Tensor:  # [N, n] -> [n, N / 8]
        return _torch(pack(values.T.reshape(-1, 8)[:, AWQ_ORDER].reshape(len(values.T), -1), 4))

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group or -1,
        "zero_point": not symmetric,
        "version": "gemm",
    }
    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scale}
    return StoredLinear(config, tensors, torch.from_numpy(weight))


def gptq(
    random: Generator,
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    version: str = "gptq",
    act_order: bool = False,
    order: Generator | None = None,
) -> StoredLinear:
    """order: of the columns with act_order; layers that are fused have the same."""
    across = group or columns
    groups = -(-columns // across)
    codes = random.integers(0, 1 << bits, (columns, rows))  # W [K, N]
    zeros = np.full((groups, rows), 1 << (bits - 1))
    if not symmetric:
        zeros = random.integers(1 if version == "gptq" else 0, 1 << bits, (groups, rows))
    scale, values = _scales(random, (groups, rows), torch.float16)
    group_of = np.arange(columns) // across
    if act_order:
        group_of = (order or random).permutation(group_of)
    weight = (codes - zeros[group_of]) * values[group_of]
    stored_zeros = zeros - 1 if version == "gptq" else zeros
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": version,
    }
    tensors = {
        "qweight": _torch(pack(codes.T, bits).T),
        "qzeros": _torch(pack(stored_zeros, bits)),
        "scales": scale,
        "g_idx": _torch(group_of, torch.int32),
    }
    return StoredLinear(config, tensors, torch.from_numpy(weight.T.copy()))
