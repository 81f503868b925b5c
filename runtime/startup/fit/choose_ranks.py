"""`python -m runtime.startup.fit.choose_ranks`: the number that --tensor-parallel auto takes.

It reads an EngineConfig, as a line of JSON, and writes a RankChoice.  In a process of its own: to
ask a GPU for its free memory takes memory on it.  Exit code 2, with one line on stderr, if the
model fits no number of the GPUs that are visible.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from attention.backend import UnsupportedAttention
from model_zoo.config import ModelError, read_config
from model_zoo.unsupported.message import explained
from runtime.config import ConfigError, EngineConfig
from runtime.startup.fit.ranks import RankChoice, choose_ranks, more_ranks, visible_gpus
from runtime.startup.fit.target import (
    FitQuery,
    least_ranks,
    memory_plan,
    rank_config,
    resolve_config,
    target_device,
    with_ranks,
)


def choose(query: FitQuery, most: int) -> RankChoice:
    """At most `most` GPUs, or 0 for a CPU.  Raises ConfigError or ModelError."""
    requested = query.config
    whole = read_config(Path(requested.model), images=requested.max_image_pixels > 0)
    of = partial(with_ranks, query, whole)
    found = choose_ranks(requested, whole, most, of, partial(least_ranks, query, whole))
    if found.fits:
        return found
    largest = replace(requested, tensor_parallel=found.ranks)
    config = rank_config(largest, whole)
    target = target_device(replace(query, config=largest), config)
    try:
        resolve_config(largest, config, target)
    except ConfigError as error:
        more = more_ranks(found.ranks, memory_plan(largest, config, target), of)
        raise ConfigError(f"--tensor-parallel auto: {found.reason}: {error}{more}") from None
    return RankChoice(found.ranks, found.reason)  # memory has been freed meanwhile


def main() -> None:
    requested = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    try:
        found = choose(FitQuery(config=requested), visible_gpus(requested))
        print(msgspec.json.encode(found).decode())
    except (ConfigError, ModelError, UnsupportedAttention) as error:
        print(f"error: {explained(error)}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
