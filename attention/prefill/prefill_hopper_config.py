"""HopperConfig: tile size and compile options of prefill_hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.kv_pool import FP8


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Stages of K, V and float8 are of one part of a tile, at most 128 columns."""

    block_n: int
    k_stages: int
    v_stages: int
    q_stages: int = 2
    out_stages: int = 2  # of the output, one for each consumer; 0: it goes where Q was
    overlapped: bool = True  # a block's p v overlaps the next block's softmax
    ping_pong: bool = True  # consumers alternate between GEMMs and softmax
    keys_first: bool = False  # load a block's keys before the values of the block before
    fp8_stages: int = 0
    convert_warps: int = 2
    convert_rows: int = 16  # of a tile, at a time
    registers: int = 240  # per thread of a consumer
    convert_registers: int = 24
    load_registers: int = 24

    @property
    def entry_registers(self) -> int:
        """Per thread at the launch, before the warps exchange them."""
        warps = 9 + (self.convert_warps if self.fp8_stages else 0)
        return 168 if warps <= 12 else 128


def hopper_config(head_dim: int, kv_dtype: torch.dtype = torch.bfloat16) -> HopperConfig:
    """The configuration for a head_dim and pages of kv_dtype, by measurement on an H100."""
    if kv_dtype == FP8:
        small = head_dim <= 128
        return HopperConfig(
            block_n=128 if small else 64, k_stages=2 if small else 4, v_stages=2 if small else 4,
            q_stages=1, out_stages=2 if small else 0, fp8_stages=2 if small else 4,
            registers=232, convert_registers=40, load_registers=40,
        )  # fmt: skip
    if head_dim > 128:
        return HopperConfig(block_n=64, k_stages=4, v_stages=4, q_stages=1)
    stages = 2 if head_dim > 64 else 4
    return HopperConfig(block_n=128, k_stages=stages, v_stages=stages)
