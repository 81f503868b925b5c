"""The engine process: `python -m runtime.engine.process`, which joins the host and device sides.

It receives requests, steps the engine and sends its outputs and statistics to the API processes.
It reads one line of JSON (`EngineProcessArgs`) from stdin, and exits when stdin ends.  Exit codes:
0 after SIGTERM, 2 if the configuration or the model cannot work (one line `error: ...` on stderr),
1 with a traceback for any other exception.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from model_zoo.layers.error_text import first_line
from runtime.config import ConfigError, EngineConfig
from runtime.engine.auto_ranks import with_chosen_ranks
from runtime.engine.followers import GC_THRESHOLD, OUT_OF_MEMORY, Followers, StallWatch
from runtime.engine.progress_report import ProgressReport
from runtime.ipc import parent_watch
from runtime.ipc.channel import Receiver, Sender
from runtime.logs import LogOptions, print_error, set_up_logging
from runtime.messages import (
    Abort,
    EngineRequest,
    EngineRequests,
    FromEngine,
    Hello,
    Observe,
    Progress,
    Ready,
    RequestOutput,
    StepOutput,
    ToEngine,
)
from runtime.precompile import preimport
from runtime.startup.timeline import Timeline
from runtime.stats import Stats

if TYPE_CHECKING:  # they import NumPy, which takes a while
    from runtime.engine.load_report import LoadReport
    from runtime.engine.loop import Engine, EngineOutputs
    from runtime.engine.observer import WavePlanner
    from runtime.executor.protocols import DeviceExecutor
    from runtime.startup.loading import Loaded

IDLE_SECONDS = 1.0  # between two heartbeats
STATS_SECONDS = 0.05  # between two messages that carry statistics alone
REPORT_SECONDS = 0.25  # in which an API process reports the last phase: errors end a start
ID_IN_USE = "a request with this id is running already"


class EngineProcessArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the engine process, read from stdin."""

    config: EngineConfig
    epoch: int
    index: int = 0  # among the engines of the server
    own_address: str
    client_addresses: list[str]
    host_free: int = 0  # of the host's memory, before the first of several engines started
    logs: LogOptions = LogOptions()
    began: float | None = None  # when the launcher decided to start us, on the monotonic clock
    ready_file: str = ""  # gets the time, on the monotonic clock, from which on it serves


class OutputPublisher:
    """Knows the API process (client) of each request, and sends each its share of a step."""

    def __init__(self, addresses: list[str]) -> None:
        self._senders: list[Sender[FromEngine]] = [Sender(address) for address in addresses]
        self._client_of: dict[int, int] = {}
        self._pending = [0] * len(addresses)
        self._last_sent = [0.0] * len(addresses)

    def register(self, request: EngineRequest, stats: Stats) -> bool:
        """Record the client of a request.  False: its id is in use, and it was answered so.

        That is an error of one API process, so the requests of the others continue.
        """
        if request.id in self._client_of:
            rejection = RequestOutput(
                request.id, [], finish="error", error=ID_IN_USE, is_request_error=True
            )
            self.send_to(request.client, StepOutput([rejection], stats))
            return False
        self._client_of[request.id] = request.client
        self._pending[request.client] += 1
        return True

    def requests_of(self, client: int) -> list[int]:
        return [id for id, owner in self._client_of.items() if owner == client]

    def publish(self, engine_outputs: EngineOutputs, stats: Stats) -> None:
        """Send each client its outputs, or statistics alone once their interval has passed."""
        now = time.monotonic()
        for client, (ids, tokens, outputs) in enumerate(self._split_by_client(engine_outputs)):
            interval = STATS_SECONDS if self._pending[client] else IDLE_SECONDS
            if ids or outputs or now - self._last_sent[client] >= interval:
                self._last_sent[client] = now
                self._senders[client].send(StepOutput(outputs, stats, ids, tokens))

    def _split_by_client(
        self, engine_outputs: EngineOutputs
    ) -> list[tuple[bytes, bytes, list[RequestOutput]]]:
        """(ids, tokens, outputs) of each client, as in StepOutput; drops finished requests."""
        ids, tokens, clients = engine_outputs.columns
        if len(self._senders) == 1:
            shares = [(ids.tobytes(), tokens.tobytes(), engine_outputs.outputs)]
        else:
            outputs: list[list[RequestOutput]] = [[] for _ in self._senders]
            for output in engine_outputs.outputs:
                outputs[self._client_of[output.id]].append(output)
            masks = [clients == client for client in range(len(self._senders))]
            shares = [
                (ids[mask].tobytes(), tokens[mask].tobytes(), more)
                for mask, more in zip(masks, outputs, strict=True)
            ]
        for output in engine_outputs.outputs:
            if output.finish is not None:
                self._pending[self._client_of.pop(output.id)] -= 1
        return shares

    def broadcast(self, message: FromEngine) -> None:
        for client in range(len(self._senders)):
            self.send_to(client, message)

    def send_to(self, client: int, message: FromEngine) -> None:
        self._senders[client].send(message)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


def serve(args: EngineProcessArgs) -> NoReturn:
    """Load, say Ready, and run until SIGTERM."""
    timeline = Timeline(args.began)
    timeline.mark("process")
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    with (
        closing(Receiver(args.own_address, decoder)) as receiver,
        closing(OutputPublisher(args.client_addresses)) as publisher,
        ExitStack() as stack,
    ):
        publisher.broadcast(Progress("starting"))
        config, why_ranks = with_chosen_ranks(
            args.config, has_driver=preimport.has_driver(), again=args.epoch > 1
        )
        followers: Followers | None = None
        if config.tensor_parallel > 1:
            _check_division(config)  # before there are processes that would all find it
            followers = Followers(config, _store(args), args.logs, args.host_free)
            stack.callback(followers.stop)
        with _errors_between_ranks(followers):
            progress = ProgressReport(publisher.broadcast, followers)
            loaded = _load(args, config, progress, timeline)
            engine = _engine_of(args, config, loaded)
            gc.collect()
            gc.freeze()  # permanent objects: later collections skip them
            gc.set_threshold(GC_THRESHOLD)
            timeline.mark("engine")
            ready = msgspec.structs.replace(
                loaded.ready,
                load_seconds=timeline.seconds,
                phases=timeline.phases(),
                why_ranks=why_ranks,
            )
            if followers is not None:
                _lead(loaded.executor, followers)
            watch = progress.started()
            note_ready(args.ready_file, time.monotonic())
            publisher.broadcast(ready)
            _run(args, config, engine, loaded.plan_waves, receiver, publisher, ready, watch)


def note_ready(file: str, now: float) -> None:
    """Write into `ready_file`, if the launcher wants it, that this engine serves from now on."""
    if file:
        with suppress(OSError):  # a full disk: the launcher takes it that this engine never served
            Path(file).write_text(repr(now))


@contextmanager
def _errors_between_ranks(followers: Followers | None) -> Iterator[None]:
    """An error of what ranks compute together ends the process, so that all of them start again."""
    try:
        yield
    except RuntimeError as error:
        if followers is not None:
            from runtime.ranks.group import is_between_ranks

            if is_between_ranks(error):
                followers.fail_between_ranks(first_line(error))
        raise


def _load(
    args: EngineProcessArgs, config: EngineConfig, progress: ProgressReport, timeline: Timeline
) -> Loaded:
    """PyTorch takes seconds to import: the clients have heard from us before, and compilers start
    meanwhile."""
    compilers = preimport.begin(config)
    gc.disable()  # a collection would traverse all imported objects and free none
    from runtime.ranks.group import ALONE, Ranks
    from runtime.startup.loading import load

    gc.freeze()
    gc.enable()
    timeline.mark("imports")
    ranks = ALONE
    if config.tensor_parallel > 1:
        ranks = Ranks.join(
            0,
            config.tensor_parallel,
            _store(args),
            device=config.device,
            deterministic=config.deterministic,
        )
        timeline.mark("ranks")
    loaded = load(
        config,
        progress,
        epoch=args.epoch,
        timeline=timeline,
        compilers=compilers,
        ranks=ranks,
        host_free=args.host_free,
    )
    if compilers is not None:
        compilers.close()  # in case no kernel was compiled
    return loaded


def _engine_of(args: EngineProcessArgs, config: EngineConfig, loaded: Loaded) -> Engine:
    from runtime.engine.loop import Engine
    from runtime.grammar.manager import GrammarManager
    from runtime.startup.device import physical_cores

    vocab_size = loaded.ready.vocab_size
    grammars = GrammarManager(
        Path(config.model) / "tokenizer.json",
        vocab_size,
        threads=max(1, min(8, physical_cores() // 4)),
        folder=Path(args.own_address.removeprefix("ipc://")).parent,
    )
    return Engine(
        loaded.resolved,
        vocab_size,
        loaded.executor,
        grammars=grammars,
        graphs=loaded.executor.graph_counts,
        images=loaded.executor.image_counts,
        index=args.index,
    )


def _run(
    args: EngineProcessArgs,
    config: EngineConfig,
    engine: Engine,
    plan_waves: WavePlanner | None,
    receiver: Receiver[ToEngine],
    publisher: OutputPublisher,
    ready: Ready,
    watch: StallWatch | None,
) -> NoReturn:
    """Receive requests, run steps and publish their outputs."""
    from runtime.engine.load_report import LoadReport
    from runtime.engine.observer import Observer

    observer = Observer(engine, publisher.broadcast, plan_waves)
    loads = None  # an only engine gets all requests
    if config.data_parallel > 1:
        loads = LoadReport(engine, publisher.send_to, len(args.client_addresses))
    while True:
        if watch is not None:
            watch.alive()
        idle = engine.idle and not engine.prepare()
        if loads is not None:
            loads.publish(idle=idle)
        for message in receiver.receive(IDLE_SECONDS if idle else 0.0):
            if isinstance(message, Observe):
                observer.observe(message)
            else:
                _handle(message, engine, publisher, ready, loads)
        publisher.publish(engine.step_columns(), engine.stats())


def _check_division(config: EngineConfig) -> None:
    """Raises ModelError if the model cannot be divided among so many ranks."""
    from model_zoo.config import read_config
    from model_zoo.parallel.sharded_config import sharded_config

    whole = read_config(Path(config.model), images=config.max_image_pixels > 0)
    sharded_config(whole, 0, config.tensor_parallel, expert_parallel=config.expert_parallel)


def _store(args: EngineProcessArgs) -> str:
    """The file by which ranks find each other, in the directory of the sockets."""
    folder = Path(args.own_address.removeprefix("ipc://")).parent
    return str(folder / f"ranks-{Path(args.own_address).name}-{args.epoch}")


def _lead(executor: DeviceExecutor, followers: Followers) -> None:
    """From now on the other ranks do what this one's executor does."""
    from runtime.ranks.messages import encode

    executor.announce = lambda step: followers.send(encode(step))


def _handle(
    message: Hello | EngineRequest | EngineRequests | Abort,
    engine: Engine,
    publisher: OutputPublisher,
    ready: Ready,
    loads: LoadReport | None,
) -> None:
    match message:
        case EngineRequests():
            for request in message.whole():
                _handle(request, engine, publisher, ready, loads)
        case EngineRequest():
            if loads is not None:
                loads.received(message.client)
            if publisher.register(message, engine.stats()):
                engine.add(message)
        case Abort():
            engine.abort(message.id)
        case Hello():
            for id in publisher.requests_of(message.client):
                engine.abort(id)
            publisher.send_to(message.client, ready)
            if loads is not None:
                loads.hello(message.client)


@contextmanager
def short_errors() -> Iterator[None]:
    """End the process with one message: code 2 if the operator has to change an option, 1 if the
    device's memory ran out; the launcher then starts a new engine, which plans with what is free.
    """
    try:
        yield
    except Exception as error:
        from attention.backend import UnsupportedAttention
        from model_zoo.config import ModelError
        from runtime.startup.device import is_out_of_memory

        if isinstance(error, (ConfigError, ModelError, UnsupportedAttention)):
            from model_zoo.unsupported.message import explained

            code, text = 2, explained(error)
        elif is_out_of_memory(error):
            code, text = 1, f"{OUT_OF_MEMORY}: {first_line(error)}"
        else:
            raise
        time.sleep(REPORT_SECONDS)
        print_error(text)
        raise SystemExit(code) from None


def main() -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    args = parent_watch.read_args(EngineProcessArgs)
    set_up_logging(args.logs)
    with short_errors():
        serve(args)


if __name__ == "__main__":
    main()
