"""Microseconds of sampling on a GPU, with the memory bound.

    python -m benchmarks.step.bench_sampler [--rows 1 32 256] [--vocab 151936] [--replays 20]

Kernels are timed as replays of a CUDA graph over several sets of logits: as after a GEMM,
those of few rows are in the L2 cache; those of 256 rows are not.  Logits fall off as a language
model's do, P(rank r) ~ r^-1.5; "flat" ones are normal, of which top-p 0.9 keeps half the tokens.
The bound reads logits, and counts where there are penalties, once at 3 TB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention.timing import GraphTimer
from runtime.messages import SamplingParams
from runtime.sampling.kernels.sample import sample
from runtime.sampling.state import ROW_WORDS, SamplerState
from runtime.scheduler.batch import NewRow

TB_PER_S = 3.0
SETS = 4
EXPONENT = 1.5
FLAT = "top-p 0.9, flat"


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


KINDS: dict[str, SamplingParams] = {
    "greedy": params(temperature=0),
    "temperature": params(temperature=0.8),
    "top-k 20, top-p 0.95": params(temperature=0.6, top_k=20, top_p=0.95),
    "top-p 0.9": params(top_p=0.9),
    FLAT: params(top_p=0.9),
    "min-p 0.05": params(min_p=0.05),
    "penalties": params(temperature=0.8, presence_penalty=1.0, repetition_penalty=1.1),
    "penalties, top-p 0.9": params(presence_penalty=1.0, top_p=0.9),
}


@dataclass(frozen=True, slots=True)
class SamplerCase:
    """What sampling one batch needs: sets of logits [R, vocab], and the rows' slots.

    A mixed batch has one row of each kind in turn.
    """

    kinds: list[SamplingParams]
    logits: list[Tensor]

    @property
    def new_rows(self) -> list[NewRow]:
        history = list(range(500))
        return [NewRow(slot, kind, slot, 400, history) for slot, kind in enumerate(self.kinds)]

    def kernels(self) -> Callable[[int], object]:
        rows, vocab = self.logits[0].shape
        state = SamplerState(rows, vocab, torch.device("cuda"))
        block = np.zeros((rows, ROW_WORDS), dtype=np.int32)
        state.pack(self.new_rows, block)
        state.apply(torch.from_numpy(block).cuda())
        for new in self.new_rows:
            if new.params.has_penalties:
                state.count(new.slot, new.history, new.prompt_len)
        numbers = {"dtype": torch.int32, "device": "cuda"}
        slots, positions = torch.arange(rows, **numbers), torch.full((rows,), 500, **numbers)
        outputs = [torch.zeros(rows, **numbers) for _ in range(3)]
        return lambda number: sample(self.logits[number], slots, positions, state, *outputs)


def make_logits(rows: int, vocab: int, dtype: torch.dtype, flat: bool) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows)

    def sample_set() -> Tensor:
        shape = (rows, vocab)
        if flat:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)
        uniform = torch.rand(shape, generator=generator, device="cuda").clamp_(1e-7, 1 - 1e-7)
        return (-EXPONENT * (-uniform.log()).log()).to(dtype)

    return [sample_set() for _ in range(SETS)]


def cases(rows: int, vocab: int, dtype: torch.dtype) -> Iterator[tuple[str, SamplerCase]]:
    steep = make_logits(rows, vocab, dtype, flat=False)
    for name, kind in KINDS.items():
        logits = make_logits(rows, vocab, dtype, flat=True) if name == FLAT else steep
        yield name, SamplerCase([kind] * rows, logits)
    if rows > 1:
        kinds = list(KINDS.values())
        yield "mixed", SamplerCase([kinds[row % len(kinds)] for row in range(rows)], steep)


def bound_us(case: SamplerCase) -> float:
    rows, vocab = case.logits[0].shape
    counted = sum(kind.has_penalties for kind in case.kinds)
    return (rows * vocab * case.logits[0].element_size() + 2 * counted * vocab) / TB_PER_S / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds to sample on a GPU.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--replays", type=int, default=20)
    args = parser.parse_args()
    timer = GraphTimer(args.replays)
    print(f"| rows | kind | us | bound us | ({args.vocab} {args.dtype} logits)")
    print("|---|---|---|---|")
    with torch.inference_mode():
        for rows in args.rows:
            for name, case in cases(rows, args.vocab, getattr(torch, args.dtype)):
                us = timer.replay([timer.capture(case.kernels(), SETS)])[0].us
                print(f"| {rows} | {name} | {us:.1f} | {bound_us(case):.1f} |")


if __name__ == "__main__":
    main()
