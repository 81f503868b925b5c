"""The launcher: starts the engine process and the API processes, watches them, stops them in order.

The API processes start first: they say how far the download is, if the model is on the Hub, and
what the engine loads.

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
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from runtime.ipc.client import ClientNotifier
from server.config import ServerConfig
from server.process.child import DEATHS_WITHIN_SECONDS, MAX_DEATHS, Child
from server.process.exclusive_files import socket_directory, store_lock
from server.process.messages import ApiProcessArgs, DownloadArgs, KeysChanged, ModelFound

log = logging.getLogger("wavefill.launcher")

CONFIGURATION_ERROR = 2
STOP_SECONDS = 10.0  # for a child to end after SIGTERM, beyond the drain


# Returns the API keys; raises ValueError with what is wrong with their file.
ReadKeys = Callable[[], tuple[str, ...]]


class Launcher:
    """The engine, the API processes, and the directory of the sockets between them."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        directory: Path,
        engine_module: str,
        revision: str,
        read_keys: ReadKeys | None,
    ) -> None:
        self._config = config
        self._read_keys = read_keys
        self._terminal = os.isatty(0)
        self._revision = revision
        self._listener = listener
        self._engine_address = f"ipc://{directory / 'engine'}"
        indices = range(config.api_workers)
        self._api_addresses = [f"ipc://{directory / f'api-{index}'}" for index in indices]
        self._engine = Child("the engine", engine_module)
        self._download = Child("the download", "server.cli.hub_download")
        self._found = directory / "model"  # gets the directory of a model that is downloaded
        variables: dict[str, str] = {}
        if config.api_workers > 1:
            # They count in files of this folder, so that each of them can sum all.
            (directory / "metrics").mkdir()
            variables["PROMETHEUS_MULTIPROC_DIR"] = str(directory / "metrics")
        module, descriptors = "server.process.api_process", (listener.fileno(),)
        self._apis = [
            Child(f"API process {index}", module, descriptors, variables) for index in indices
        ]
        self._notifier = ClientNotifier(self._api_addresses)
        self._epoch = 0
        self._stop = asyncio.Event()
        self._killed = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        await asyncio.gather(*map(self._start_api, range(len(self._apis))))
        watchers = [
            asyncio.create_task(self._run_engine()),
            *(
                asyncio.create_task(
                    self._watch(api, partial(self._start_api, index), partial(_log_end, api.name))
                )
                for index, api in enumerate(self._apis)
            ),
        ]
        stopped = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([*watchers, stopped], return_when="FIRST_COMPLETED")
        code = next((watcher.result() for watcher in watchers if watcher in done), 0)
        for task in (*watchers, stopped):
            task.cancel()
        await self._shut_down(at_once=code != 0)
        self._notifier.close()
        return code

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

    async def _run_engine(self) -> int:
        """Find the model's files, then run the engine on them; returns the code to end with."""
        if not self._config.model_directory:
            await self._start_download()
            report = partial(_log_end, self._download.name)
            code = await self._watch(self._download, self._start_download, report, done=(0,))
            if code:
                return code
            self._take_model(self._found.read_text(encoding="utf-8"))
        await self._start_engine()
        return await self._watch(self._engine, self._start_engine, self._engine_ended)

    async def _start_download(self) -> None:
        await self._download.start(
            DownloadArgs(
                name=self._config.engine.model,
                revision=self._revision,
                client_addresses=self._api_addresses,
                result=str(self._found),
                config=self._config,
            )
        )

    def _take_model(self, directory: str) -> None:
        engine = replace(self._config.engine, model=directory)
        self._config = replace(self._config, model_directory=directory, engine=engine)
        for api in self._apis:
            api.send(ModelFound(directory))

    async def _start_engine(self) -> None:
        self._epoch += 1
        await self._engine.start(
            {
                "config": self._config.engine,
                "epoch": self._epoch,
                "own_address": self._engine_address,
                "client_addresses": self._api_addresses,
                "began": time.monotonic(),
            }
        )

    async def _start_api(self, index: int) -> None:
        await self._apis[index].start(
            ApiProcessArgs(
                config=self._config,
                index=index,
                engine_address=self._engine_address,
                own_address=self._api_addresses[index],
                listener=self._listener.fileno(),
            )
        )

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
                died = "%s died %d times within %.0f s: giving up"
                log.error(died, child.name, MAX_DEATHS, DEATHS_WITHIN_SECONDS)
                return 1
            await asyncio.sleep(delay)
            await start()

    def _engine_ended(self, code: int) -> None:
        _log_end("the engine process", code)
        self._notify_clients(code)

    def _notify_clients(self, code: int) -> None:
        self._notifier.engine_down(f"the engine process ended with {_describe(code)}", self._epoch)

    async def _notify_during_drain(self) -> None:
        """During the drain the engine is not restarted: clients must not wait for it."""
        if self._engine.started:
            self._notify_clients(await self._engine.wait())

    async def _shut_down(self, at_once: bool) -> None:
        """The API processes first: they drain while the engine still works."""
        config = self._config
        seconds = 1.0 if at_once else config.drain_delay + config.drain_seconds + STOP_SECONDS
        self._listener.close()  # the port is open until the API processes have closed it, too
        watching = asyncio.create_task(self._notify_during_drain())
        await self._end(self._apis, seconds)
        watching.cancel()
        await self._end([self._download, self._engine], STOP_SECONDS)

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


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _log_end(name: str, code: int) -> None:
    hint = ": the system may have run out of memory, see `dmesg`" if code == -signal.SIGKILL else ""
    log.error("%s ended with %s%s", name, _describe(code), hint)


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
