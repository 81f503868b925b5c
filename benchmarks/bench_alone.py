"""How often a greedy answer depends on what runs beside it.

    python -m benchmarks.bench_alone --shape qwen3-0.6b --rows 64

Each prompt is answered alone, and then all at once.  In exact arithmetic the answers are equal; in
bfloat16 a product's kernel depends on the number of rows, and a tie may fall the other way.  Random
weights are a hard case: their largest logits are close to each other.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from benchmarks.shapes import SHAPES, write_model
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.loading import Loaded, load
from runtime.messages import Request, SamplingParams


def answers(loaded: Loaded, prompts: dict[int, list[int]], max_tokens: int) -> dict[int, list[int]]:
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    found: dict[int, list[int]] = {id: [] for id in prompts}
    for id, prompt in prompts.items():
        engine.add(Request(id, 0, prompt, params))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id] += output.tokens
    return found


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1), None
    )


def report(name: str, one: dict[int, list[int]], other: dict[int, list[int]]) -> None:
    places = [first_difference(tokens, other[id]) for id, tokens in one.items()]
    differ = sorted(place for place in places if place is not None)
    print(f"{name}: {len(differ)} of {len(one)} answers differ, first at tokens {differ[:12]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--alone", type=int, default=64, help="of them, answered alone as well")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--prompt-len", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(arguments.shape, Path(folder) / "model")
        config = EngineConfig(
            model=str(path), load_format="dummy", max_model_len=4096, prefix_cache=False
        )
        loaded = load(config, lambda phase, done, total: None)
    draw = random.Random(0)
    prompts = {
        id: [draw.randrange(loaded.ready.vocab_size) for _ in range(arguments.prompt_len)]
        for id in range(arguments.rows)
    }
    alone: dict[int, list[int]] = {}
    for id in range(min(arguments.alone, arguments.rows)):
        alone |= answers(loaded, {id: prompts[id]}, arguments.tokens)
    together = answers(loaded, prompts, arguments.tokens)
    print(f"{arguments.shape}, {loaded.ready.dtype}, answers of {arguments.tokens} tokens")
    report(f"alone and in {arguments.rows} rows", alone, together)
    report("the same rows again", together, answers(loaded, prompts, arguments.tokens))


if __name__ == "__main__":
    main()
