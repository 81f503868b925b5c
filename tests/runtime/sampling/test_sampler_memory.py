"""Rows are sampled a few at a time, which changes the memory in use and no token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.messages import SamplingParams
from runtime.sampling import torch_sampler as module
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.torch_sampler import TorchSampler
from runtime.scheduler.batch import NewRow
from tests.support.kernels.sampler_cases import torch_sampler

VOCAB = 97
KINDS = (
    SamplingParams(9, temperature=0, logprobs=3),
    SamplingParams(9, temperature=1.0, top_p=0.9, frequency_penalty=0.5),
    SamplingParams(9, temperature=0.7, top_k=9, logprobs=0, logit_bias={5: 3.0}),
    SamplingParams(9, temperature=0.4, banned=((3,), (4, 5)), min_p=0.1),
    SamplingParams(9, temperature=1.5, allowed_ids=(1, 2, 3), logprobs=5, logprob_ids=(7, 8, 9)),
    SamplingParams(9, temperature=1.5, min_tokens=2, stop_ids=(1, 2, 3)),
)


def drawn(rows: int) -> tuple[SamplerOutput, TorchSampler]:
    new_rows = [NewRow(slot, KINDS[slot % 6], slot, 2, [3, 4]) for slot in range(rows)]
    sampler = torch_sampler(new_rows, VOCAB)
    noise = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    masked = np.arange(3, rows, 4)
    bits = np.random.default_rng(1).integers(0, 256, (len(masked), -(-VOCAB // 8)), dtype=np.uint8)
    ids = np.arange(rows)
    allowed = AllowedMasks(masked, bits)
    return sampler.sample_slots(noise.half(), ids, np.full(rows, 2), allowed), sampler


@pytest.mark.parametrize("at_once", [1, 4, 22])
def test_rows_drawn_a_few_at_a_time_are_those_drawn_together(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, slots = drawn(23)
    monkeypatch.setattr(module, "CHUNK_LOGITS", at_once * VOCAB + 5)
    apart, other_slots = drawn(23)
    assert apart.tokens.tolist() == together.tokens.tolist()
    assert apart.usable.tolist() == together.usable.tolist()
    assert apart.scored == together.scored and apart.widths == together.widths
    assert apart.scores is not None and together.scores is not None
    for found, wanted in zip(apart.scores.tensors(), together.scores.tensors(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert torch.equal(slots.last_token, other_slots.last_token)
    assert torch.equal(slots.counts, other_slots.counts)
    assert torch.equal(slots.banned.recent, other_slots.banned.recent)
