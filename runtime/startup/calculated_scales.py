"""--calculate-kv-scales: scales of fp8 keys and values, from what a prompt of random tokens stores.

A scale is a power of two, so that dividing by it rounds nothing, and that a start whose GEMMs round
otherwise finds the same one.  Scales are in place before the first request and never change: pages
that the prefix cache keeps, and CUDA graphs, which read the scales from memory, stay right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.kv_pool import KVPool
from runtime.config import ResolvedConfig
from runtime.executor.protocols import DeviceExecutor
from runtime.scheduler.batch import Batch, make_batch
from runtime.startup.warm_up import GREEDY, new_row, run, state_slots

LARGEST = 448.0  # of e4m3
MARGIN = 2.0  # how many times as large as here keys and values may be, at least
WIDER = 16.0  # factor of a scale whose largest number was cut off
# Each starts with the scales of the one before.  Scales of 1 grow to 4096 at most, of keys of up to
# 1.8 million; the last one measures with the scales that are in use but for its own correction.
PASSES = 5
MAX_TOKENS = {"cuda": 2048, "cpu": 64}


def calculate_kv_scales(
    executor: DeviceExecutor, kv: KVPool, resolved: ResolvedConfig, vocab_size: int
) -> None:
    """Set the pool's scales; what its first pages hold is lost."""
    groups = resolved.num_groups
    tokens = min(
        MAX_TOKENS[resolved.device],
        resolved.max_batched_tokens,
        resolved.max_model_len - 1,
        resolved.num_pages // groups * resolved.page_size,
    )
    pages = -(-tokens // resolved.page_size)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocab_size, (tokens,), generator=generator).tolist()
    batch = _prompt(resolved, prompt, pages)
    kv.k[:, : pages * groups].zero_()  # and so what a prompt does not fill of its last page
    kv.v[:, : pages * groups].zero_()
    for _ in range(PASSES):  # as many on each device of a model that is on several
        run(executor, batch)
        for layer in kv.layers:
            written = slice(layer.group, pages * groups, groups)
            for stored, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
                assert scale is not None
                largest = stored[written].float().abs().amax((0, 2, 3))
                scale.copy_(next_scale(largest, scale))


def next_scale(largest: Tensor, scale: Tensor) -> Tensor:
    """largest, scale [kv_heads]: the largest numbers that were stored, by the scales there were."""
    seen = largest * scale
    fitting = torch.exp2(torch.ceil(torch.log2(seen * (MARGIN / LARGEST))))
    usable = (seen > 0) & seen.isfinite()
    return torch.where(usable, torch.where(largest >= LARGEST, scale * WIDER, fitting), scale)


def _prompt(resolved: ResolvedConfig, tokens: list[int], pages: int) -> Batch:
    """One sequence, each of whose pages is one of its own; a page of every group in turn."""
    return make_batch(
        slots=[0],
        starts=[0],
        q_lens=[len(tokens)],
        tokens=tokens,
        num_new_pages=[pages],
        new_pages=list(range(pages * resolved.num_groups)),
        sample=[True],
        decode_rows=0,
        new_rows=[new_row(0, GREEDY, len(tokens))],
        state_slots=state_slots(resolved, 1),
    )
