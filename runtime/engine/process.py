"""The engine process: `python -m runtime.engine.process`, which joins the host and device sides.

It reads one line of JSON (`EngineProcessArgs`) from stdin, and exits when stdin ends.  Exit codes:
0 after SIGTERM, 2 if the configuration or the model cannot work (one line `error: ...` on stderr),
1 with a traceback for our own mistakes.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec

from runtime.config import ConfigError, EngineConfig
from runtime.ipc import parent_watch
from runtime.ipc.channel import Receiver
from runtime.ipc.publisher import IDLE_SECONDS, OutputPublisher, ProgressReport
from runtime.messages import Abort, EngineRequest, Hello, Progress, Ready, ToEngine
from runtime.precompile import preimport
from runtime.startup.timeline import Timeline

if TYPE_CHECKING:
    from runtime.engine.loop import Engine

GC_THRESHOLD = 50_000  # allocations between two collections: a step makes hundreds, without cycles
OUT_OF_MEMORY = (
    "memory ran out in a step, perhaps because another program took what was free when the engine "
    "started: it starts again with what is free now; lower --gpu-memory if that comes back"
)


class EngineProcessArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the engine process, read from stdin."""

    config: EngineConfig
    epoch: int
    own_address: str
    client_addresses: list[str]
    began: float | None = None  # when the launcher decided to start us, on the monotonic clock


def serve(args: EngineProcessArgs) -> NoReturn:
    """Load, say Ready, and run until SIGTERM."""
    timeline = Timeline(args.began)
    timeline.mark("process")
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    with (
        closing(Receiver(args.own_address, decoder)) as receiver,
        closing(OutputPublisher(args.client_addresses)) as publisher,
    ):
        publisher.broadcast(Progress("starting"))
        # PyTorch takes seconds to import: the clients hear from us first, and compilers start
        # meanwhile.  The garbage collector would traverse all imported objects and free none.
        compilers = preimport.begin(args.config)
        gc.disable()
        from runtime.engine.loop import Engine
        from runtime.grammar.manager import GrammarManager
        from runtime.startup.device import physical_cores
        from runtime.startup.loading import load

        gc.freeze()
        gc.enable()
        timeline.mark("imports")
        loaded = load(
            args.config,
            ProgressReport(publisher),
            epoch=args.epoch,
            timeline=timeline,
            compilers=compilers,
        )
        if compilers is not None:
            compilers.close()  # in case no kernel was compiled
        vocab_size = loaded.ready.vocab_size
        grammars = GrammarManager(
            Path(args.config.model) / "tokenizer.json",
            vocab_size,
            threads=max(1, min(8, physical_cores() // 4)),
            folder=Path(args.own_address.removeprefix("ipc://")).parent,
        )
        engine = Engine(loaded.resolved, vocab_size, loaded.executor, grammars=grammars)
        gc.collect()
        gc.freeze()  # permanent objects: later collections skip them
        gc.set_threshold(GC_THRESHOLD)
        timeline.mark("engine")
        ready = msgspec.structs.replace(
            loaded.ready, load_seconds=timeline.seconds, phases=timeline.phases()
        )
        publisher.broadcast(ready)
        while True:
            idle = not engine.has_work and not engine.prepare()
            for message in receiver.receive(IDLE_SECONDS if idle else 0.0):
                _handle(message, engine, publisher, ready)
            publisher.publish(engine.step_columns(), engine.stats())


def _handle(message: ToEngine, engine: Engine, publisher: OutputPublisher, ready: Ready) -> None:
    match message:
        case EngineRequest():
            if publisher.register(message, engine.stats()):
                engine.add(message)
        case Abort():
            engine.abort(message.id)
        case Hello():
            for id in publisher.requests_of(message.client):
                engine.abort(id)
            publisher.send_to(message.client, ready)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line: code 2 if the operator has to change an option, 1 if the
    device's memory ran out; the launcher then starts a new engine, which plans with what is free.
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
            code, line = 1, f"{OUT_OF_MEMORY}: {reason.splitlines()[0]}"
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
    args = parent_watch.read_args(EngineProcessArgs)
    with one_line_errors():
        serve(args)


if __name__ == "__main__":
    main()
