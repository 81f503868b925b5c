"""Rows to sample: by the kernels on a device, by TorchSampler, and in plain float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.messages import SamplingParams
from runtime.sampling.kernels.sample import sample
from runtime.sampling.rng import uniform
from runtime.sampling.sampler import SamplerOutput
from runtime.sampling.state import ROW_WORDS, SamplerState
from runtime.sampling.torch_sampler import TorchSampler
from runtime.scheduler.batch import NewRow

ROUNDING = 5e-6  # of a cumulative probability: float32 sums and exponentials


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SamplerRow:
    params: SamplingParams
    seed: int = 0
    history: tuple[int, ...] = (0,)
    prompt_len: int = 1

    def new(self, slot: int) -> NewRow:
        return NewRow(slot, self.params, self.seed, self.prompt_len, list(self.history))


class Kernels:
    """A state that holds `rows` in slots of their order; `run` samples them once."""

    def __init__(self, rows: list[SamplerRow], vocab: int, device: str) -> None:
        self.device = torch.device(device)
        self.rows = rows
        self.state = SamplerState(len(rows), vocab, self.device)
        new_rows = [row.new(slot) for slot, row in enumerate(rows)]
        block = np.zeros((len(rows) + 1, ROW_WORDS), dtype=np.int32)
        self.state.pack(new_rows, block)
        self.state.apply(torch.from_numpy(block).to(self.device))
        for new in new_rows:
            if new.params.has_penalties:
                self.state.count(new.slot, new.history, new.prompt_len)
        self.last_token = torch.full((len(rows),), -7, dtype=torch.int64, device=self.device)

    def run(
        self, logits: Tensor, slots: list[int] | None = None, positions: list[int] | None = None
    ) -> tuple[list[int], list[bool]]:
        """(tokens, usable): of all slots, by default at the ends of their histories."""
        slots = list(range(len(self.rows))) if slots is None else slots
        if positions is None:
            positions = [len(self.rows[slot].history) if slot >= 0 else 0 for slot in slots]
        numbers = {"dtype": torch.int32, "device": self.device}
        tokens = torch.full((len(slots),), -9, **numbers)
        usable = torch.zeros(len(slots), dtype=torch.bool, device=self.device)
        sample(
            logits.to(self.device), torch.tensor(slots, **numbers),
            torch.tensor(positions, **numbers), self.state, self.last_token, tokens, usable,
        )  # fmt: skip
        return tokens.tolist(), usable.tolist()


def draw_eagerly(rows: list[SamplerRow], logits: Tensor) -> SamplerOutput:
    """What TorchSampler samples of the same logits, on a CPU."""
    sampler = torch_sampler([row.new(slot) for slot, row in enumerate(rows)], logits.shape[1])
    positions = np.asarray([len(row.history) for row in rows])
    return sampler.sample_slots(logits.float().clone(), np.arange(len(rows)), positions)


def torch_sampler(new_rows: list[NewRow], vocab: int) -> TorchSampler:
    """A TorchSampler with a slot for each row."""
    sampler = TorchSampler(vocab, torch.zeros(len(new_rows), dtype=torch.int64))
    sampler.reset(new_rows)
    return sampler


def is_right(token: int, row: SamplerRow, logits: Tensor) -> bool:
    """Whether the definitions give this token, where rounding may decide between neighbours."""
    values = _adjusted(row, logits)
    requested = row.params
    if requested.temperature == 0 or requested.top_k == 1:
        return bool(values[token] >= values.max() - 1e-5 * abs(values.max()))
    p = np.exp((values - values.max()) / np.float32(requested.temperature))
    position = np.asarray([len(row.history)])
    number = uniform(np.asarray([row.seed], dtype=np.uint64), position)[0]
    return any(
        _covers(token, np.where(_kept(p, requested, top_p), p, 0), number)
        for top_p in (requested.top_p, requested.top_p - ROUNDING, requested.top_p + ROUNDING)
    )


def _adjusted(row: SamplerRow, logits: Tensor) -> NDArray[np.float64]:
    values, requested = logits.double().numpy().copy(), row.params
    seen = list(set(row.history))
    if requested.has_penalties:
        factor = np.float64(requested.repetition_penalty)
        values[seen] = np.where(values[seen] > 0, values[seen] / factor, values[seen] * factor)
        for token, count in Counter(row.history[row.prompt_len :]).items():
            values[token] -= requested.frequency_penalty * count + requested.presence_penalty
    if len(row.history) - row.prompt_len < requested.min_tokens:
        values[list(requested.stop_ids)] = -np.inf
    return values


def _kept(p: NDArray[np.float64], requested: SamplingParams, top_p: float) -> NDArray[np.bool_]:
    """Tokens as likely as the last that top-k and top-p leave, and min-p."""
    largest = np.sort(p)[::-1]
    if requested.top_k:
        largest = largest[: requested.top_k]
    if requested.top_p < 1:
        before = np.cumsum(largest) - largest
        largest = largest[: max(1, int((before < top_p * largest.sum()).sum()))]
    return (p >= largest[-1] * (1 - 1e-7)) & (p >= requested.min_p * p.max() * (1 - 1e-6))


def _covers(token: int, weights: NDArray[np.float64], number: float) -> bool:
    """Whether the token's part of the cumulative distribution holds the number, or nearly so."""
    before = weights[:token].sum() / weights.sum()
    after = before + weights[token] / weights.sum()
    return bool(weights[token] > 0 and before - ROUNDING <= number <= after + ROUNDING)
