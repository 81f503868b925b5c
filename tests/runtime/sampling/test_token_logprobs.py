"""Log-probabilities of tokens and their alternatives."""

from __future__ import annotations

import pytest
import torch

from runtime.sampling.logprobs import score


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_alternatives_come_by_their_log_probability(device: str):
    logits = torch.randn(5, 300, device=device)
    scores = score(logits, torch.arange(5, device=device), 7)
    expected = logits.log_softmax(-1).topk(7)
    assert torch.equal(scores.top_logprobs, expected.values)
    assert torch.equal(scores.top_ids, expected.indices)
    assert torch.equal(scores.logprobs, logits.log_softmax(-1).diagonal())


@pytest.mark.gpu
def test_equally_likely_alternatives_are_the_same_ones_whatever_the_number_of_rows():
    logits = torch.randn(64, 151936, device="cuda").bfloat16().float()  # hundreds are equal
    tokens = torch.zeros(64, dtype=torch.int64, device="cuda")
    whole = score(logits, tokens, 20)
    for rows in (1, 5, 25, 41):
        assert torch.equal(score(logits[:rows], tokens[:rows], 20).top_ids, whole.top_ids[:rows])
    order = torch.sort(-logits.log_softmax(-1), dim=-1, stable=True).indices[:, :20]
    assert torch.equal(whole.top_ids, order), "the first ids come first"
