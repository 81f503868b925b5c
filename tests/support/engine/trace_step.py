"""Which files of the repository one warmed decode step runs.

    TRITON_INTERPRET=1 python -m tests.support.engine.trace_step

Counted are the files with a Python function that runs in the engine process from taking messages to
publishing outputs, for one row that decodes, fills no page, does not end, and has a temperature
alone.  The step's CUDA graph is captured: its replay runs no Python.  There is no GPU here,
so a recorded step stands for the graph, and the file that calls the CUDA driver is added by name.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from runtime.cuda_graph.buffers import RING
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.graphs import CapturedGraph
from runtime.engine.loop import Engine
from runtime.engine.process import OutputPublisher
from runtime.grammar.manager import GrammarManager
from runtime.ipc.channel import Receiver
from runtime.messages import EngineRequest, SamplingParams, ToEngine
from tests.support.engine.device_engine import device_engine, sizes
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.paths import ROOT

ON_A_GPU = {"runtime/cuda_graph/driver.py"}
STEPS = 3


class RecordedGraph:
    """Stands for a captured graph: the outputs of the step before stay."""

    def replay(self) -> None:
        pass


def traced_files(folder: Path) -> dict[str, set[str]]:
    """Function names by file of STEPS decode steps.  folder: for a checkpoint and sockets."""
    write_checkpoint("qwen3", folder)
    resolved = sizes(slots=4, budget=24, pages=20, page_size=16, max_len=64, prefix_cache=True)
    device = torch.device("cpu")
    template, executor = device_engine(folder, device, resolved, graph_steps=True)
    assert isinstance(executor, GraphExecutor)
    vocab_size = template.requests.vocab_size
    grammars = GrammarManager(folder / "tokenizer.json", vocab_size)
    engine = Engine(resolved, vocab_size, executor, grammars=grammars)
    own, client = (f"ipc://{folder}/{name}" for name in ("engine", "client"))
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    with (
        closing(Receiver(own, decoder)) as receiver,
        closing(OutputPublisher([client])) as publisher,
    ):
        request = EngineRequest(0, 0, [1, 2, 3], SamplingParams(60, temperature=0.7))
        publisher.register(request, engine.stats())
        engine.add(request)

        def step() -> None:
            for _ in receiver.receive(0.0):
                raise AssertionError("no process sends a message")
            publisher.publish(engine.step_columns(), engine.stats())

        step()
        step()
        assert executor._outputs is not None
        bucket = executor.planner.fit(1, 1)
        graph: Any = RecordedGraph()
        executor.graphs.captured[bucket] = CapturedGraph(graph, executor._outputs)
        for _ in range(2 * RING):  # each buffer of the rings has its views then
            step()
        found: dict[str, set[str]] = {}
        here = Path(__file__).name

        def note(frame: FrameType, event: str, _: object) -> None:
            path = Path(frame.f_code.co_filename)
            ours = (
                path.is_relative_to(ROOT)
                and "site-packages" not in path.parts
                and path.name != here
            )
            if event == "call" and ours:
                found.setdefault(str(path.relative_to(ROOT)), set()).add(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            for _ in range(STEPS):
                step()
        finally:
            sys.setprofile(None)
    return found


def main() -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = traced_files(Path(folder))
    for name, functions in sorted(found.items()):
        print(f"{name}: {', '.join(sorted(functions))}")
    print(*(f"{name}: on a GPU" for name in sorted(ON_A_GPU)), sep="\n")
    print(len(found.keys() | ON_A_GPU), "files")


if __name__ == "__main__":
    main()
