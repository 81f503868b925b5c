"""How often an answer depends on the batch, and the cost of batch invariance.

    python -m benchmarks.step.bench_batch_invariance --shape qwen3-0.6b --rows 64

Each prompt is answered alone, and then all at once: greedily, and with a seed.  In exact arithmetic
the answers are equal; in bfloat16 a GEMM's kernel depends on the number of rows, and a tie may
fall the other way.  Random weights are a hard case: their largest logits are close to each other.
With --deterministic, which comes second, none may differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from benchmarks.shapes import SHAPES, write_model
from runtime.config import EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams
from runtime.startup.loading import Loaded, load

Tokens = dict[int, list[int]]  # by request


@dataclass
class AnswerTimes:
    tokens: Tokens
    seconds: list[float] = field(default_factory=list[float])  # of steps in which all decode
    prompt_seconds: float = 0.0  # of steps with parts of prompts


def answers(loaded: Loaded, prompts: Tokens, params: SamplingParams) -> AnswerTimes:
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)
    found = AnswerTimes({id: [] for id in prompts})
    for id, prompt in prompts.items():
        engine.add(EngineRequest(id, 0, prompt, replace(params, seed=id)))
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            found.tokens[output.id] += output.tokens
        stats = engine.stats()
        if stats.step_tokens == stats.running == len(prompts):
            found.seconds.append(stats.step_seconds)
        elif stats.step_tokens > len(prompts):
            found.prompt_seconds += stats.step_seconds
    return found


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1), None
    )


def report(name: str, one: Tokens, other: Tokens) -> int:
    places = [first_difference(tokens, other[id]) for id, tokens in one.items()]
    differ = sorted(place for place in places if place is not None)
    print(f"  {name}: {len(differ)} of {len(one)} answers differ, first at tokens {differ[:12]}")
    return len(differ)


def compare(loaded: Loaded, prompts: Tokens, num_alone: int, max_tokens: int) -> int:
    """Prints what differs, and the median step alone and of all rows -> how many answers differ."""
    print(f"{loaded.ready.dtype}, {loaded.ready.attention}")
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    differ = 0
    for name, params in (("greedy", greedy), ("seeded", replace(greedy, temperature=1.0))):
        alone, seconds = dict[int, list[int]](), list[float]()
        for id in list(prompts)[:num_alone]:
            single = answers(loaded, {id: prompts[id]}, params)
            alone |= single.tokens
            seconds += single.seconds
        together = answers(loaded, prompts, params)
        differ += report(f"{name}, alone and in {len(prompts)} rows", alone, together.tokens)
        again = answers(loaded, prompts, params)
        report(f"{name}, the same rows again", together.tokens, again.tokens)
        print(
            f"  {name}: {1e3 * statistics.median(seconds):.2f} ms a step alone, "
            f"{1e3 * statistics.median(together.seconds + again.seconds):.2f} ms of all rows, "
            f"{1e3 * again.prompt_seconds:.1f} ms in steps with their prompts"
        )
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--alone", type=int, default=64, help="of them, answered alone as well")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--prompt-len", type=int, default=128)
    arguments = parser.parse_args()
    each = arguments.prompt_len + arguments.tokens + 16
    rng, vocab = random.Random(0), SHAPES[arguments.shape]["vocab_size"]
    prompts = {
        id: [rng.randrange(vocab) for _ in range(arguments.prompt_len)]
        for id in range(arguments.rows)
    }
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(arguments.shape, Path(folder) / "model", layers=arguments.layers)
        for deterministic in (False, True):
            config = EngineConfig(
                model=str(path), load_format="dummy", max_model_len=each, prefix_cache=False,
                max_num_seqs=max(arguments.rows, 1), kv_tokens=arguments.rows * each,
                deterministic=deterministic,
            )  # fmt: skip
            loaded = load(config, lambda phase, done, total: None)
            print(f"{arguments.shape}, answers of {arguments.tokens} tokens, ", end="")
            print("--deterministic, " if deterministic else "", end="")
            differ = compare(loaded, prompts, arguments.alone, arguments.tokens)
            assert not (deterministic and differ), "--deterministic is not batch-invariant"


if __name__ == "__main__":
    main()
