"""HopperConfig: tile size, stages and registers of prefill_hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.kv_pool import FP8


@dataclass(frozen=True, slots=True)
class HopperConfig:
    block_n: int
    stages: int = 2  # blocks of K, of V and of float8 in shared memory
    q_stages: int = 2
    out_stages: int = 2  # of the output, one for each consumer; 0: it goes where Q was
    keys_first: bool = False  # load a block's keys before the values of the block before
    convert_rows: int = 16  # of a float8 tile, at a time
    registers: int = 240  # per thread of a consumer
    load_registers: int = 24  # of the warps that load and convert


def hopper_config(head_dim: int, kv_dtype: torch.dtype = torch.bfloat16) -> HopperConfig:
    """The configuration for a head_dim and pages of kv_dtype, by measurement on an H200
    (2026-11-23, docs/lab/attention-kernels.md)."""
    if kv_dtype == FP8:
        if head_dim > 128:
            return HopperConfig(
                block_n=64, q_stages=1, out_stages=0, registers=232, load_registers=40
            )
        return HopperConfig(
            block_n=128, q_stages=1, convert_rows=32, registers=216, load_registers=72
        )
    if head_dim > 128:
        return HopperConfig(block_n=64, q_stages=1, keys_first=True)
    if head_dim > 64:
        return HopperConfig(block_n=128, keys_first=True)
    return HopperConfig(block_n=128, stages=4)
