"""Rank 1 of models, in a process of its own that loads one after the other.

    python -m tests.support.parallel.gloo_rank STORE DEVICE MEMORY PIPE [FOLDER]

It reads a line of JSON, an EngineConfig, for each model, and follows the steps of rank 0 until an
empty message.  With FOLDER the norms compute the sums, in memory that is mapped from files there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from runtime.config import EngineConfig
from runtime.ipc.broadcast import BroadcastReceiver
from runtime.ranks.group import Ranks
from runtime.ranks.messages import decode
from runtime.startup.loading import load
from tests.support.interpreter.of_processes import interpret_sooner
from tests.support.parallel.gloo_engine import forget_sums
from tests.support.parallel.mapped_memory import MappedMemory


def main() -> None:
    interpret_sooner()
    store, device, memory, pipe = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
    ranks = Ranks.join(1, 2, store, device=device, deterministic=False)
    if len(sys.argv) > 5:
        ranks = replace(ranks, rendezvous=MappedMemory(Path(sys.argv[5]), 1))
    receiver = BroadcastReceiver(memory, pipe, reader=0, readers=1)
    for line in sys.stdin:
        config = msgspec.json.decode(line, type=EngineConfig)
        executor = load(config, lambda phase, done, total: None, ranks=ranks).executor
        while message := receiver.receive():
            executor.follow(decode(message))
        forget_sums(ranks)


if __name__ == "__main__":
    main()
