"""One API process: `python -m server.process.api_process`, started by the launcher.

It reads `ApiProcessArgs` as one line of JSON from stdin, and ends when stdin does, which means that
its parent is dead.  SIGTERM drains (server/process/drain.py); then the process ends with code 0.
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
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import prometheus_client
import uvloop

from runtime.ipc.client import EngineClient
from server.apis.responses.database import Limits
from server.apis.responses.store import ResponseStore, StoreUnusable
from server.app import create_app, line_app
from server.batches.database import DataError
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore
from server.config import ServerConfig
from server.generation.request_log import RequestLog
from server.metrics.metrics import Metrics
from server.process.drain import drain
from server.process.http_server import http_server
from server.process.logs import set_up_logging
from server.process.start_report import Reporter
from server.prompt.tokenizer import ChatTokenizer, TokenizerError
from server.state import ServerState

log = logging.getLogger("wavefill.server")

ORPHANED = 3  # exit code
DAY_SECONDS = 86400.0
GC_THRESHOLD = 10_000  # objects made and kept between two collections


class ApiProcessArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The message of the launcher on stdin."""

    config: ServerConfig
    index: int
    engine_address: str
    own_address: str
    listener: int  # file descriptor


async def serve(start: ApiProcessArgs) -> None:
    """Answer requests until SIGTERM, then drain.

    Raises TokenizerError, StoreUnusable, DataError.
    """
    config = start.config
    tokenizer = tokenizer_of(config)
    client = EngineClient(
        start.index,
        start.engine_address,
        start.own_address,
        stall_seconds=config.stall_seconds,
    )
    await client.start()
    store = response_store(start)
    await store.open()
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    metrics = Metrics(config.served_names[0], config.metrics_compat, shared)
    metrics.watch(
        ready=lambda: client.ready,
        stats=lambda: client.stats,
        alive=lambda: client.ready is not None and client.unhealthy() is None,
    )
    batches = None
    if config.data_dir:
        batches = BatchStore(Path(config.data_dir), max_bytes=config.max_data_bytes)
    state = ServerState(
        config,
        client,
        tokenizer,
        metrics,
        requests=RequestLog(config.request_history),
        batch_requests=RequestLog(config.request_history),
        responses=store,
        batches=batches,
    )
    app = create_app(state)
    server = http_server(app, config)
    gc.collect()
    gc.freeze()  # collecting permanent objects would stop all streams for 50 ms
    gc.set_threshold(GC_THRESHOLD)
    async with background_work(start, state) as runner:
        loop = asyncio.get_running_loop()
        listener = socket.socket(fileno=start.listener)
        drains: list[asyncio.Task[None]] = []  # an event loop keeps no reference to its tasks

        def on_sigterm() -> None:
            gate = app.state.drain_state
            drains.append(loop.create_task(drain(server, listener, gate, state, runner)))

        loop.add_signal_handler(signal.SIGTERM, on_sigterm)
        await server.serve([listener])


def tokenizer_of(config: ServerConfig) -> ChatTokenizer:
    """Raises TokenizerError."""
    return ChatTokenizer.load(
        config.model_directory,
        chat_template=config.chat_template,
        special_in_content=config.special_tokens_in_content,
    )


@contextlib.asynccontextmanager
async def background_work(
    start: ApiProcessArgs, state: ServerState
) -> AsyncGenerator[asyncio.Task[None] | None]:
    """Runs the start report, and batches, whose task is yielded."""
    config, client, batches = start.config, state.client, state.batches
    # One process reports for all of them.
    reporter = Reporter(config, client, chats=state.tokenizer.template is not None)
    report = asyncio.create_task(reporter.run()) if start.index == 0 else None
    runner = None
    if batches is not None:
        batch_runner = BatchRunner(batches, line_app(state), client, config, state.metrics)
        runner = asyncio.create_task(batch_runner.run())
    try:
        yield runner
    finally:
        if report is not None:
            report.cancel()
        if runner is not None and batches is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
            batches.close()


def response_store(start: ApiProcessArgs) -> ResponseStore:
    """The store that all API processes share: --response-store, or a file next to their sockets."""
    config = start.config
    seconds = config.response_store_days * DAY_SECONDS
    limits = Limits(bytes=config.response_store_bytes, seconds=seconds)
    sockets = Path(start.own_address.removeprefix("ipc://")).parent
    path = config.response_store or str(sockets / "responses")
    return ResponseStore(path, limits, start.index, config.api_workers)


def die_with_parent() -> None:
    """End this process at once when stdin ends."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()


def main() -> None:
    # Ctrl-C in a terminal reaches the whole process group; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prometheus_client.disable_created_metrics()
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(ORPHANED)
    start = msgspec.json.decode(line, type=ApiProcessArgs)
    die_with_parent()
    set_up_logging(start.config.log_level, start.config.log_format)
    try:
        uvloop.run(serve(start))
    except (TokenizerError, StoreUnusable, DataError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
