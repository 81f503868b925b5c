"""Rows are sampled a few at a time, which changes the memory in use and no token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.executor.slots import SequenceSlots
from runtime.messages import SamplingParams
from runtime.sampling import eager
from runtime.sampling.eager import AllowedMasks, sample_tokens
from runtime.sampling.sampler_output import SamplerOutput
from runtime.scheduler.batch import NewRow, make_batch

VOCAB = 97
KINDS = (
    SamplingParams(9, temperature=0, logprobs=3),
    SamplingParams(9, temperature=1.0, top_p=0.9, frequency_penalty=0.5),
    SamplingParams(9, temperature=0.7, top_k=9, logprobs=0, logit_bias={5: 3.0}),
    SamplingParams(9, temperature=0.4, banned=((3,), (4, 5)), min_p=0.1),
    SamplingParams(9, temperature=1.5, allowed_ids=(1, 2, 3), logprobs=5, logprob_ids=(7, 8, 9)),
    SamplingParams(9, temperature=1.5, min_tokens=2, stop_ids=(1, 2, 3)),
)


def sample(device: torch.device, rows: int) -> tuple[SamplerOutput, SequenceSlots]:
    slots = SequenceSlots(rows, 4, VOCAB, device)
    new_rows = [NewRow(slot, KINDS[slot % 6], slot, 2, [3, 4]) for slot in range(rows)]
    slots.begin(make_batch(new_rows=new_rows))
    noise = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    masked = np.arange(3, rows, 4)
    bits = np.random.default_rng(1).integers(0, 256, (len(masked), -(-VOCAB // 8)), dtype=np.uint8)
    ids = np.arange(rows)
    found = sample_tokens(
        noise.half().to(device), slots, ids, np.full(rows, 2), AllowedMasks(masked, bits)
    )
    return found, slots


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("at_once", [1, 4, 22])
def test_rows_sampled_a_few_at_a_time_equal_rows_sampled_together(
    device: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
    together, slots = sample(where, 23)
    monkeypatch.setattr(eager, "CHUNK_LOGITS", at_once * VOCAB + 5)
    apart, other_slots = sample(where, 23)
    assert apart.tokens.tolist() == together.tokens.tolist()
    assert apart.usable.tolist() == together.usable.tolist()
    assert apart.scored == together.scored and apart.widths == together.widths
    assert apart.scores is not None and together.scores is not None
    for found, expected in zip(apart.scores.tensors(), together.scores.tensors(), strict=True):
        torch.testing.assert_close(found, expected)
    assert torch.equal(slots.last_token, other_slots.last_token)
    assert torch.equal(slots.counts, other_slots.counts)
    assert torch.equal(slots.constraints.recent, other_slots.constraints.recent)


@pytest.mark.gpu
def test_drawing_256_rows_of_a_large_vocabulary_takes_little_memory():
    device = torch.device("cuda", torch.cuda.current_device())
    rows, vocab = 256, 151_936
    slots = SequenceSlots(rows, 4, vocab, device)
    params = SamplingParams(
        9, temperature=0.5, top_p=0.9, top_k=1000, repetition_penalty=1.1, logprobs=20
    )
    new_rows = [NewRow(slot, params, slot, 2, [3, 4]) for slot in range(rows)]
    slots.begin(make_batch(new_rows=new_rows))
    logits = torch.randn(rows, vocab, device=device).to(torch.bfloat16)
    masks = AllowedMasks(np.arange(rows), np.full((rows, -(-vocab // 8)), 255, dtype=np.uint8))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample_tokens(logits, slots, np.arange(rows), np.full(rows, 2), masks)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 3 * 4 * rows * vocab
