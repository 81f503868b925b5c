"""One API process: `python -m server.process.api_process`, started by the launcher.

It reads `ApiProcessArgs` as one line of JSON from stdin, and ends when stdin does, which means that
the launcher is gone.  While no other process takes connections, it answers at once, and loads the
tokenizer meanwhile; one that would only refuse requests which another can answer takes no
connections before the model is ready.  SIGTERM drains (see server/process/drain.py); then the
process ends with code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import prometheus_client
import uvloop

from runtime.ipc.client import EngineClient
from runtime.logs import bound_stdout, print_error
from server.apis.responses.database import Limits
from server.apis.responses.store import ResponseStore, StoreUnusable
from server.app import create_app, line_app
from server.batches.database import DataError
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore
from server.config import ServerConfig
from server.engine import Engine, engine_state
from server.generation.request_log import RequestLog
from server.http.access import ApiKeys
from server.loaded_model import PHASES, PROCESSOR_FILES, LoadedModel
from server.metrics.metrics import Metrics
from server.metrics.shared_files import count_as
from server.process.drain import drain
from server.process.http_server import http_server
from server.process.logs import set_up_logging
from server.process.messages import ApiProcessArgs, KeysChanged, ModelFound
from server.process.parent import read_args, watch
from server.process.report.start_report import Reporter
from server.prompt.tokenizer import ChatTokenizer, TokenizerError
from server.state import ServerState

if TYPE_CHECKING:
    from server.images.reader import ImageReader
    from server.telemetry.tracing import Tracing

log = logging.getLogger("wavefill.server")

DAY_SECONDS = 86400.0
POLL_SECONDS = 0.05
READY = "ready"  # what a process writes into its file once it takes connections with the model
OTHERS_SECONDS = 5.0  # that a process with the model waits for one that takes connections without
CONFIG_SECONDS = 60.0  # that an engine may take until it has read config.json
GC_THRESHOLD = 10_000  # objects made and kept between two collections


async def serve(start: ApiProcessArgs) -> None:
    """Answer requests until SIGTERM, then drain.  Until the model is loaded, they get 503, or go to
    another process unless `start.at_once`.

    Raises TokenizerError, StoreUnusable, DataError.
    """
    config, loop = start.config, asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()  # the directory of the model
    if config.model_directory:
        found.set_result(config.model_directory)
    client = EngineClient(start.index, start.engines, stall_seconds=config.stall_seconds)
    await client.start()
    store = response_store(start)
    await store.open()
    tracing = tracing_to(config.otlp_traces_endpoint)
    state = server_state(start, client, store, tracing)
    app = create_app(state)
    client.on_snapshot = state.dashboard.take  # pages at other API processes ask for our share

    def on_line(line: bytes) -> None:
        loop.call_soon_threadsafe(on_message, line, found, app.state.api_keys)

    watch(on_line)
    server, listener = http_server(app, config, state.metrics), socket.socket(fileno=start.listener)
    work = BackgroundWork(start, state)
    drains: list[asyncio.Task[None]] = []  # an event loop keeps no reference to its tasks
    gate, taking = app.state.drain_state, Path(start.taking)

    def on_sigterm() -> None:
        drains.append(loop.create_task(drain(server, listener, gate, state, work.stop_batches)))

    async def until(condition: Callable[[], bool]) -> None:
        while not (condition() or gate.draining):
            await asyncio.sleep(POLL_SECONDS)

    async def become_ready() -> None:
        await until(lambda: loading.done() and client.ready is not None)
        if not start.at_once:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until(partial(others_ready, taking)), OTHERS_SECONDS)
        if not gate.draining:
            with contextlib.suppress(OSError):  # a full disk: the others do not wait for ever
                taking.write_text(READY)

    async def serve_http() -> None:
        ready = loop.create_task(become_ready())
        if not start.at_once:
            await ready
        if not gate.draining:
            await server.serve([listener])
        ready.cancel()

    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    loading = loop.create_task(load_model(state, found))
    serving = loop.create_task(serve_http())
    try:
        await asyncio.wait({serving, loading}, return_when="FIRST_COMPLETED")
        if loading.done():
            loading.result()
            work.start()
        await serving
    finally:
        loading.cancel()
        await work.close()
        if tracing is not None:
            await tracing.close()


def others_ready(taking: Path) -> bool:
    """Whether the other processes that take connections have the model, too.

    Who has seen /readyz answer 200 must not be refused by a process that is a moment later.
    """
    try:
        found = [path.read_text() for path in taking.parent.glob("taking-*") if path != taking]
    except FileNotFoundError:  # of a process that is started again: look once more
        return False
    return all(text == READY for text in found)


def server_state(
    start: ApiProcessArgs, client: EngineClient, store: ResponseStore, tracing: Tracing | None
) -> ServerState:
    """What every route works with.  Raises DataError."""
    config = start.config
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    metrics = Metrics(config.served_names[0], config.metrics_compat, shared)
    for engine in client.engines:
        metrics.watch(
            ready=partial(getattr, engine, "ready"),
            stats=partial(getattr, engine, "stats"),
            state=partial(engine_state, engine),
            server_pid=os.getppid(),
            engine=engine.index,
        )
    batches = None
    if config.data_dir:
        batches = BatchStore(Path(config.data_dir), max_bytes=config.max_data_bytes)
    return ServerState(
        config,
        client,
        LoadedModel(),
        metrics,
        requests=RequestLog(config.request_history),
        batch_requests=RequestLog(config.request_history),
        responses=store,
        batches=batches,
        tracing=tracing,
    )


def tracing_to(endpoint: str) -> Tracing | None:
    """OpenTelemetry is only loaded where there is an endpoint."""
    if not endpoint:
        return None
    from server.telemetry.tracing import Tracing, otlp_provider

    return Tracing(otlp_provider(endpoint))


def on_message(line: bytes, found: asyncio.Future[str], keys: ApiKeys) -> None:
    """A line of the launcher."""
    message = msgspec.json.decode(line, type=ModelFound | KeysChanged)
    if isinstance(message, KeysChanged):
        keys.replace(message.keys)
    elif not found.done():
        found.set_result(message.directory)


async def load_model(state: ServerState, found: asyncio.Future[str]) -> None:
    """Raises TokenizerError."""
    config, directory = state.config, await found
    try:
        tokenizer = await asyncio.to_thread(tokenizer_of, config, directory)
    except TokenizerError:
        # A model that is not supported may well have another kind of tokenizer.  The engine says
        # what is wrong with config.json before it allocates the weights, and ends the server.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(config_read(state.client), CONFIG_SECONDS)
        raise
    images = await asyncio.to_thread(images_of, config, directory, tokenizer)
    state.model.set(tokenizer, directory, images)
    gc.collect()
    gc.freeze()  # collecting permanent objects would stop all streams for 50 ms
    gc.set_threshold(GC_THRESHOLD)


async def config_read(client: Engine) -> None:
    """Until an engine has found that it can run the model."""
    early = list(PHASES)[: list(PHASES).index("model")]
    while client.ready is None and (client.progress is None or client.progress.phase in early):
        await asyncio.sleep(POLL_SECONDS)


def tokenizer_of(config: ServerConfig, directory: str) -> ChatTokenizer:
    """Raises TokenizerError."""
    return ChatTokenizer.load(
        directory,
        chat_template=config.chat_template,
        special_in_content=config.special_tokens_in_content,
    )


def images_of(config: ServerConfig, directory: str, tokenizer: ChatTokenizer) -> ImageReader | None:
    """None for a model without an image processor, for which nothing of images is loaded.

    Raises TokenizerError.
    """
    has_processor = any((Path(directory) / name).is_file() for name in PROCESSOR_FILES)
    if not has_processor or not config.engine.max_image_pixels:
        return None
    from server.images.model_files import image_reader

    return image_reader(config, directory, tokenizer)


class BackgroundWork:
    """The start report, and the batches, from when the model is loaded."""

    def __init__(self, start: ApiProcessArgs, state: ServerState) -> None:
        self._start, self._state = start, state
        self._report: asyncio.Task[None] | None = None
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        state, config = self._state, self._state.config
        if self._start.index == 0:  # one process reports for all of them
            chats = state.tokenizer.template is not None
            processes = state.model.images is not None
            reporter = Reporter(config, state.client, chats=chats, processes=processes)
            self._report = asyncio.create_task(reporter.run())
            self._report.add_done_callback(partial(log_failure, what="the start report"))
        if state.batches is not None:
            app = line_app(state)
            runner = BatchRunner(state.batches, app, state.client, config, state.metrics)
            self._runner = asyncio.create_task(runner.run())
            self._runner.add_done_callback(partial(log_failure, what="the runner of batches"))

    def stop_batches(self) -> None:
        """Unfinished lines run after the next start."""
        if self._runner is not None:
            self._runner.cancel()

    async def close(self) -> None:
        if self._report is not None:
            self._report.cancel()
        self.stop_batches()
        if self._runner is not None:
            await asyncio.gather(self._runner, return_exceptions=True)
        if self._state.batches is not None:
            self._state.batches.close()


def log_failure(task: asyncio.Task[None], what: str) -> None:
    """Of a task that nothing awaits while the server runs."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has failed; the server goes on without it", what, exc_info=error)


def response_store(start: ApiProcessArgs) -> ResponseStore:
    """The store that all API processes share: --response-store, or a file next to their sockets."""
    config = start.config
    seconds = config.response_store_days * DAY_SECONDS
    limits = Limits(bytes=config.response_store_bytes, seconds=seconds)
    sockets = Path(start.engines[0].own.removeprefix("ipc://")).parent
    path = config.response_store or str(sockets / "responses")
    return ResponseStore(path, limits, start.index, config.api_workers)


def main() -> None:
    prometheus_client.disable_created_metrics()
    start = read_args(ApiProcessArgs)
    config = start.config
    if config.api_workers > 1:
        count_as(start.index)
    set_up_logging(config.log_level, config.log_format, log_requests=config.log_requests)
    bound_stdout()  # which gets the start report
    try:
        uvloop.run(serve(start))
        gc.freeze()  # a last collection could take longer than a process without a model has to end
    except (TokenizerError, StoreUnusable, DataError) as error:
        print_error(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
