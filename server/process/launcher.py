"""The launcher: starts engine and API processes, watches them, stops them in order.

The API processes start first: they say how far the download is, if the model is on the Hub, and
what the engine loads.

Of several engines one that dies is restarted while the others serve; one that keeps dying is given
up, and the server goes on without it as long as another one is left.

It runs nothing that a request could break.  Its children die with it: each reads its stdin, and
the end of stdin means that the launcher is gone, however it went.

    exit 0   stopped by SIGTERM or SIGINT, after the drain
    exit 1   a child kept dying
    exit 2   the configuration cannot work; the child has said why
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runtime.logs import LogOptions
from server.config import ServerConfig
from server.process.child import DEATHS_WITHIN_SECONDS, MAX_DEATHS, Child, describe
from server.process.engine_process import EngineProcess
from server.process.exclusive_files import (
    LaunchError,
    reserve_metrics,
    socket_directory,
    store_lock,
)
from server.process.messages import ApiProcessArgs, DownloadArgs, KeysChanged, ModelFound

log = logging.getLogger("wavefill.launcher")

CONFIGURATION_ERROR = 2
MAX_PAUSE_SECONDS = 30.0  # between attempts to start a process for which the system has no room
STOP_SECONDS = 10.0  # for a child to end after SIGTERM, beyond the drain


# Returns the API keys; raises ValueError with what is wrong with their file.
ReadKeys = Callable[[], tuple[str, ...]]


class Launcher:
    """The engines, the API processes, and the directory of the sockets between them."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        directory: Path,
        engine_module: str,
        revision: str,
        read_keys: ReadKeys | None,
    ) -> None:
        """Raises LaunchError."""
        self._config = config
        self._read_keys = read_keys
        self._terminal = os.isatty(0)
        self._revision = revision
        self._listener = listener
        indices = range(config.api_workers)
        variables: dict[str, str] = {}
        if config.api_workers > 1:
            metrics = directory / "metrics"
            reserve_metrics(metrics, config)
            variables["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        self._engines = [
            EngineProcess(index, config.engine, engine_module, directory, config.api_workers)
            for index in range(config.engine.data_parallel)
        ]
        self._download = Child("the download", "server.cli.hub_download")
        self._found = directory / "model"  # gets the directory of a model that is downloaded
        module, descriptors = "server.process.api_process", (listener.fileno(),)
        self._apis = [
            Child(f"API process {index}", module, descriptors, variables) for index in indices
        ]
        # Of each API process: the file is there once the process takes connections.
        self._taking = [directory / f"taking-{index}" for index in indices]
        self._stop = asyncio.Event()
        self._killed = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        tasks: list[asyncio.Task[Any]] = []
        code = 1  # of a child that cannot be started
        try:
            code = await self._run_children(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await self._shut_down(at_once=code != 0)
            self.close()
        return code

    async def _run_children(self, tasks: list[asyncio.Task[Any]]) -> int:
        """Run all until a signal, or until one is given up; tasks: gets those that still run."""
        starts = [partial(self.start_api, index) for index in range(len(self._apis))]
        named = zip(self._apis, starts, strict=True)
        await asyncio.gather(*(_start_first(api.name, start) for api, start in named))
        watchers = [asyncio.create_task(self._run_engines())]
        for index, (api, start) in enumerate(zip(self._apis, starts, strict=True)):
            watching = self._watch(api, start, partial(self._api_ended, index))
            watchers.append(asyncio.create_task(watching))
        tasks += [*watchers, asyncio.create_task(self._stop.wait())]
        done, _ = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        return next((watcher.result() for watcher in watchers if watcher in done), 0)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _on_signal(self) -> None:
        """The first one drains, the second one ends everything now."""
        if self._stop.is_set():
            self._killed.set()
        self._stop.set()

    def _on_hangup(self) -> None:
        """Read the API keys again; but stop where the terminal that we were started in has gone."""
        if self._terminal and not os.isatty(0):
            self._on_signal()
            return
        if self._read_keys is None:
            log.warning("SIGHUP: there is no --api-key-file to read again")
            return
        try:
            keys = self._read_keys()
        except ValueError as error:
            log.error("SIGHUP: the API keys stay as they were: %s", error)
            return
        before, after = (
            {entry.split()[-1] for entry in of} for of in (self._config.api_keys, keys)
        )
        self._config = replace(self._config, api_keys=keys)
        for api in self._apis:
            api.send(KeysChanged(keys))
        log.info(
            "SIGHUP: API keys read again: %d in all, %d new, %d removed",
            *(len(after), len(after - before), len(before - after)),
        )

    async def _run_engines(self) -> int:
        """Find the model's files, then run the engines on them; returns the code to end with."""
        if not self._config.model_directory:
            await _start_first(self._download.name, self._start_download)
            report = partial(_log_end, self._download.name)
            code = await self._watch(self._download, self._start_download, report, done=(0,))
            if code:
                return code
            self._take_model(self._found.read_text(encoding="utf-8"))
        running = {
            asyncio.create_task(self._run_engine(engine)): engine for engine in self._engines
        }
        try:
            return await self._first_that_ends_the_server(running)
        finally:
            for task in running:
                task.cancel()

    async def _first_that_ends_the_server(
        self, running: dict[asyncio.Task[int], EngineProcess]
    ) -> int:
        """Wait until no engine is left, or the configuration is found to be wrong at first."""
        left = set(running)
        while True:
            done, left = await asyncio.wait(left, return_when="FIRST_COMPLETED")
            for task in done:
                code, engine = task.result(), running[task]
                if not left or (code == CONFIGURATION_ERROR and engine.epoch == 1):
                    return code
                log.error("the server goes on without %s: engines left: %d", engine.name, len(left))

    async def _run_engine(self, engine: EngineProcess) -> int:
        """Run one engine, again if it dies; returns the code with which it was given up."""

        async def start() -> None:
            config = self._config
            await engine.start(config.engine, LogOptions(config.log_level, config.log_format))

        def ended(code: int) -> None:
            _log_end(engine.name, code)
            engine.tell_clients(code)

        await _start_first(engine.name, start)
        code = await self._watch(engine.child, start, ended)
        if code == CONFIGURATION_ERROR:
            engine.tell_clients(code)
        return code

    async def _start_download(self) -> None:
        await self._download.start(
            DownloadArgs(
                name=self._config.engine.model,
                revision=self._revision,
                client_addresses=self._engines[0].client_addresses,
                result=str(self._found),
                config=self._config,
            )
        )

    def _take_model(self, directory: str) -> None:
        engine = replace(self._config.engine, model=directory)
        self._config = replace(self._config, model_directory=directory, engine=engine)
        for api in self._apis:
            api.send(ModelFound(directory))

    async def start_api(self, index: int) -> None:
        # While another one answers, connections are not for a process that has to refuse requests.
        taking = self._taking[index]
        taking.unlink(missing_ok=True)
        at_once = not any(path.exists() for path in self._taking)
        if at_once:
            taking.touch()
        await self._apis[index].start(
            ApiProcessArgs(
                config=self._config,
                index=index,
                engines=[engine.addresses[index] for engine in self._engines],
                listener=self._listener.fileno(),
                at_once=at_once,
                taking=str(taking),
            )
        )

    def _api_ended(self, index: int, code: int) -> None:
        self._taking[index].unlink(missing_ok=True)  # at once: others may start before it does
        _log_end(self._apis[index].name, code)

    async def _watch(
        self,
        child: Child,
        start: Callable[[], Awaitable[None]],
        report: Callable[[int], None],
        done: tuple[int, ...] = (),
    ) -> int:
        """Report the exit code of a child that dies and restart it; returns the code to end with.

        A child that ends with a code of `done` is not restarted.  The Hello of a new API process
        ends the requests that the dead one had.
        """
        while True:
            code = await child.wait()
            if code == CONFIGURATION_ERROR or code in done:
                return code
            report(code)
            delay = child.died()
            if delay is None:
                died = "%s died %d times within %.0f s of service: giving up"
                log.error(died, child.name, MAX_DEATHS, DEATHS_WITHIN_SECONDS)
                return 1
            await asyncio.sleep(delay)
            await _start_again(child.name, start)

    async def _shut_down(self, at_once: bool) -> None:
        """The API processes first: they drain while the engine still works."""
        config = self._config
        seconds = 1.0 if at_once else config.drain_delay + config.drain_seconds + STOP_SECONDS
        self._listener.close()  # the port is open until the API processes have closed it, too
        watching = [asyncio.create_task(engine.tell_clients_of_end()) for engine in self._engines]
        await self._end(self._apis, seconds)
        for task in watching:
            task.cancel()
        engines = [engine.child for engine in self._engines]
        await self._end([self._download, *engines], STOP_SECONDS)

    async def _end(self, children: list[Child], seconds: float) -> None:
        """Stop them; from the second signal on at once."""
        ending = asyncio.gather(*(child.stop(seconds) for child in children))
        killed = asyncio.create_task(self._killed.wait())
        await asyncio.wait([ending, killed], return_when="FIRST_COMPLETED")
        if not ending.done():
            for child in children:
                child.signal(signal.SIGKILL)
        await ending
        killed.cancel()


async def _start_first(name: str, start: Callable[[], Awaitable[None]]) -> None:
    """Raises LaunchError where the system has no process for it: nothing serves yet."""
    try:
        await start()
    except (OSError, RuntimeError) as error:  # as below
        raise LaunchError(
            f"{name} cannot be started: {error}: end other programs, or raise the limit of "
            "processes of this user or container"
        ) from error


async def _start_again(name: str, start: Callable[[], Awaitable[None]]) -> None:
    """Until the system has a process for it: the others serve meanwhile."""
    seconds = 1.0
    while True:
        try:
            await start()
            return
        # asyncio has a thread for each process; the process of one without a thread has lost its
        # stdin, and ends.
        except (OSError, RuntimeError) as error:
            log.error("%s cannot be started: %s: next try in %.0f s", name, error, seconds)
            await asyncio.sleep(seconds)
            seconds = min(2.0 * seconds, MAX_PAUSE_SECONDS)


def _log_end(name: str, code: int) -> None:
    hint = ": the system may have run out of memory, see `dmesg`" if code == -signal.SIGKILL else ""
    log.error("%s ended with %s%s", name, describe(code), hint)


def launch(
    config: ServerConfig,
    listener: socket.socket,
    engine_module: str = "runtime.engine.process",
    revision: str = "",
    read_keys: ReadKeys | None = None,
) -> int:
    """Run the server on an open listener; returns the exit code.

    Without `config.model_directory`, `config.engine.model` is a Hub id, which is downloaded in this
    revision.  SIGHUP calls `read_keys`, if there is a file of keys.  Raises LaunchError.
    """

    with store_lock(config.response_store), socket_directory() as directory:
        launcher = Launcher(config, listener, directory, engine_module, revision, read_keys)
        return asyncio.run(launcher.run())
