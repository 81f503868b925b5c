"""The engine process: `python -m runtime.engine.process`, the only file that joins both wings.

It reads one line of JSON (a `Start`) from stdin, and takes the end of stdin as the death of its
parent.  Exit codes: 0 after SIGTERM, 2 if the configuration or the model cannot work (one line
`error: ...` on stderr), 1 with a traceback for our own mistakes.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from runtime.config import ConfigError, EngineConfig
from runtime.ipc import parent_watch
from runtime.ipc.channel import Receiver
from runtime.ipc.publisher import IDLE_SECONDS, Clients, ProgressReport
from runtime.messages import Abort, EngineRequest, Hello, Progress, ToEngine
from runtime.precompile import preimport
from runtime.startup.timeline import Timeline

GC_THRESHOLD = 50_000  # objects made between two collections: a step makes hundreds, no cycles
RAN_OUT = (
    "memory ran out in a step, perhaps because another program took what was free when the engine "
    "started: it starts again with what is free now; lower --gpu-memory if that comes back"
)


class EngineProcessArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher says on stdin."""

    config: EngineConfig
    epoch: int
    own_address: str
    client_addresses: list[str]
    began: float | None = None  # when the launcher decided to start us, on the monotonic clock


def serve(start: EngineProcessArgs) -> NoReturn:
    """Load, say Ready, and run until SIGTERM."""
    timeline = Timeline(start.began)
    timeline.mark("process")
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    with (
        closing(Receiver(start.own_address, decoder)) as receiver,
        closing(Clients(start.client_addresses)) as clients,
    ):
        clients.broadcast(Progress("starting"))
        # PyTorch takes seconds to import: the clients hear from us before it, and much can be done
        # beside it.  The garbage collector would look at all that it makes, and find nothing.
        compilers = preimport.begin(start.config)
        gc.disable()
        from runtime.engine.loop import Engine
        from runtime.grammar.manager import GrammarManager
        from runtime.startup.device import physical_cores
        from runtime.startup.loading import load

        gc.freeze()
        gc.enable()
        timeline.mark("imports")
        loaded = load(
            start.config,
            ProgressReport(clients),
            epoch=start.epoch,
            timeline=timeline,
            compilers=compilers,
        )
        if compilers is not None:
            compilers.close()  # if nobody had a kernel compiled
        vocab_size = loaded.ready.vocab_size
        grammars = GrammarManager(
            Path(start.config.model) / "tokenizer.json",
            vocab_size,
            threads=max(1, min(8, physical_cores() // 4)),
            folder=Path(start.own_address.removeprefix("ipc://")).parent,
        )
        engine = Engine(loaded.resolved, vocab_size, loaded.executor, grammars=grammars)
        gc.collect()
        gc.freeze()  # what was made until now stays: the collector need not look at it again
        gc.set_threshold(GC_THRESHOLD)
        timeline.mark("engine")
        ready = msgspec.structs.replace(
            loaded.ready, load_seconds=timeline.seconds, phases=timeline.phases()
        )
        clients.broadcast(ready)
        while True:
            idle = not engine.has_work and not engine.prepare()
            for message in receiver.receive(IDLE_SECONDS if idle else 0.0):
                match message:
                    case EngineRequest():
                        if clients.expect(message, engine.stats()):
                            engine.add(message)
                    case Abort():
                        engine.abort(message.id)
                    case Hello():
                        for id in clients.requests_of(message.client):
                            engine.abort(id)
                        clients.send_to(message.client, ready)
            clients.publish(engine.advance(), engine.stats())


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line: code 2 if the operator has to change something, 1 if the
    device's memory ran out; the launcher then starts another engine, which plans with what is left.
    """
    try:
        yield
    except Exception as error:
        code, line = 2, str(error)
        if not isinstance(error, _operator_errors()):
            from runtime.startup.device import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            reason = str(error) or type(error).__name__  # a MemoryError says nothing
            code, line = 1, f"{RAN_OUT}: {reason.splitlines()[0]}"
        print(f"error: {line}", file=sys.stderr, flush=True)
        raise SystemExit(code) from None


def _operator_errors() -> tuple[type[Exception], ...]:
    from attention.backend import UnsupportedAttention
    from model_zoo.config import ModelError

    return (ConfigError, ModelError, UnsupportedAttention)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, _terminate)
    start = parent_watch.begin(EngineProcessArgs)
    with one_line_errors():
        serve(start)


if __name__ == "__main__":
    main()
