"""The cost of constrained streams to others: `python -m benchmarks.server.bench_structured`.

The real engine, runner, sampler and grammar process on a CPU; the model is a table of random logits
whose forward pass takes a fixed time.  64 plain streams are timed alone, with 16 more plain ones,
and with 16 streams under JSON schemas, interleaved, because a machine's speed varies.  A
constrained stream that ends is replaced at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec import structs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from benchmarks.schedule.host_step import fake_config
from model_zoo.inputs import ModelInput
from runtime.engine.loop import Engine
from runtime.executor.torch_executor import TorchExecutor
from runtime.grammar.manager import GrammarManager
from runtime.messages import EngineRequest, SamplingParams
from runtime.startup.device import keep_freed_memory

PAGE_SIZE = 64
LENGTH = 1 << 15  # plain streams do not end while they are timed
COMPACT = {"whitespace_flexible": False}
SCHEMAS = [
    {
        "type": "object",
        "properties": {f"field_{number}": kind for number, kind in enumerate(kinds)},
        "required": [f"field_{number}" for number in range(len(kinds))],
        "additionalProperties": False,
        "x-guidance": COMPACT,
    }
    for kinds in (
        [{"type": "string", "maxLength": 8}, {"type": "integer"}, {"type": "boolean"}],
        [{"enum": [f"value {number}" for number in range(200)]}, {"type": "number"}],
        [{"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3}],
        [{"anyOf": [{"type": "null"}, {"type": "string", "format": "date-time"}]}] * 2,
    )
]


def write_tokenizer(file: Path, size: int) -> None:
    """A byte-level BPE whose tokens are runs of letters, digits and spaces, as many as wanted."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: place for place, char in enumerate(alphabet)}
    letters = [*"etaoinshrdlucmfwypvbgkjqxz0123456789", "\u0120"]
    merges: list[tuple[str, str]] = []
    for length in itertools.count(2):
        for parts in itertools.product(letters, repeat=length):
            if len(vocabulary) == size - 1:
                break
            first, last = "".join(parts[:-1]), parts[-1]
            if first in vocabulary and first + last not in vocabulary:
                vocabulary[first + last] = len(vocabulary)
                merges.append((first, last))
        if len(vocabulary) == size - 1:
            break
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(file))


class TableModel:
    """Logits from a table, after `seconds` during which the processor is free."""

    def __init__(self, vocab: int, seconds: float) -> None:
        self._table = torch.randn(256, vocab)
        self._seconds = seconds

    def __call__(self, inp: ModelInput) -> Tensor:
        time.sleep(self._seconds)
        states = (inp.tokens * 31 + inp.positions * 17)[:, None]
        return states if inp.ends is None else states[inp.ends]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table.index_select(0, hidden[:, 0].long() % len(self._table))


def make_engine(grammars: GrammarManager, vocab: int, seconds: float, rows: int) -> Engine:
    resolved = structs.replace(
        fake_config(rows, LENGTH), load_format="auto", max_batched_tokens=1024,
        page_size=PAGE_SIZE, num_pages=rows * 64, prefix_cache=False,
    )  # fmt: skip
    kv = KVPool.allocate(
        layers=1, pages=1, kv_heads=1, page_size=PAGE_SIZE, head_dim=1,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    runner = TorchExecutor(
        TableModel(vocab, seconds),
        resolved=resolved,
        vocab_size=vocab,
        kv=kv,
        backend=ReferenceBackend(),
        device=torch.device("cpu"),
    )
    return Engine(resolved, vocab, runner, grammars=grammars)


@dataclass
class Streams:
    """Plain streams that never end, and constrained ones that follow each other."""

    engine: Engine
    vocab: int
    plain: int
    added: int
    constrained: bool
    ids: Iterator[int] = field(default_factory=itertools.count)
    answers: int = 0  # constrained ones that ended by themselves

    def start(self) -> None:
        for _ in range(self.plain):
            self._add("", 0.0)
        for _ in range(self.added):
            self._add(self._grammar(), 1.0)
        while self.engine.stats().step_tokens != self.plain + self.added:
            self._step()
        for _ in range(20):
            self._step()

    def _grammar(self) -> str:
        if not self.constrained:
            return ""
        return json.dumps({"grammars": [{"json_schema": SCHEMAS[self.answers % len(SCHEMAS)]}]})

    def _add(self, grammar: str, temperature: float) -> None:
        id = next(self.ids)
        params = SamplingParams(
            max_tokens=300 if grammar else 3000,
            seed=id,
            temperature=temperature,
            stop_ids=(self.vocab - 1,) if grammar else (),
            grammar=grammar,
        )
        self.engine.add(EngineRequest(id, 0, [id % self.vocab, 1, 2], params))

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finish is not None:
                assert output.finish != "error", output.error
                self.answers += output.finish == "stop"
                self._add(self._grammar(), 1.0)

    def gaps(self, steps: int) -> list[float]:
        """Milliseconds between the tokens of the plain streams, which share every step."""
        times = [time.perf_counter()]
        for _ in range(steps):
            self._step()
            times.append(time.perf_counter())
        return [1000 * (then - now) for now, then in itertools.pairwise(times)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--plain", type=int, default=64)
    parser.add_argument(
        "--added", type=int, default=16, help="constrained, or plain for comparison"
    )
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=200, help="timed in each round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as an engine on a CPU does
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        write_tokenizer(file, args.vocab)
        cases = {"alone": (0, False), "with plain": (args.added, False)}
        cases["with constrained"] = (args.added, True)
        gaps: dict[str, list[list[float]]] = {name: [] for name in cases}
        answers = 0
        grammars = GrammarManager(file, args.vocab)
        for _ in range(args.rounds):
            for name, (added, constrained) in cases.items():
                rows = args.plain + added
                engine = make_engine(grammars, args.vocab, args.forward_ms / 1000, rows)
                streams = Streams(engine, args.vocab, args.plain, added, constrained)
                streams.start()
                gaps[name].append(streams.gaps(args.steps))
                answers += streams.answers
                for id in range(next(streams.ids)):
                    engine.abort(id)
                engine.step()
        grammars.close()
    report(gaps, answers)


def report(gaps: dict[str, list[list[float]]], answers: int) -> None:
    """Print the best round of each case, which other load on the machine disturbed least."""
    middle: dict[str, tuple[float, float]] = {}
    print("inter-token latency of the plain streams, ms")
    for name, rounds in gaps.items():
        p50 = min(percentile(times, 0.5) for times in rounds)
        p99 = min(percentile(times, 0.99) for times in rounds)
        middle[name] = (p50, p99)
        print(f"  {name:20} p50 {p50:7.2f}  p99 {p99:7.2f}  worst {max(map(max, rounds)):7.2f}")
    for base in ("alone", "with plain"):
        pairs = zip(middle["with constrained"], middle[base], strict=True)
        ratios = [found / of for found, of in pairs]
        print(f"  constrained / {base:13} p50 {ratios[0]:.3f}  p99 {ratios[1]:.3f}")
    print(f"constrained answers that ended: {answers}")


if __name__ == "__main__":
    main()
