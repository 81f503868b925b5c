"""EngineProcess: one engine of the launcher, its sockets, its restarts, and its GPU."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from runtime.config import EngineConfig
from runtime.host_memory import free_host_bytes
from runtime.ipc.client import ClientNotifier, EngineAddress
from runtime.logs import LogOptions
from server.process.child import Child, describe
from server.visible_gpus import VISIBLE_DEVICES, expanded, listed

DEVICES = Path("/dev")


class EngineProcess:
    def __init__(
        self, index: int, config: EngineConfig, module: str, directory: Path, num_clients: int
    ) -> None:
        """directory: of the sockets; num_clients: API processes"""
        several = config.data_parallel > 1
        name = f"engine {index}" if several else "the engine"
        variables: dict[str, str] = {}
        if config.device != "cpu":
            if several:
                variables = visible_devices(index, gpus_of_engine(config))
            else:
                variables = expanded(os.environ)
        self.name = name if several else "the engine process"
        self._ready_file = directory / f"serving-{index}"
        self.child = Child(name, module, variables=variables, ready_file=self._ready_file)
        self.addresses = [
            EngineAddress(
                f"ipc://{directory / f'engine-{index}'}",
                f"ipc://{directory / f'api-{client}.{index}'}",
            )
            for client in range(num_clients)
        ]
        self.index, self.epoch = index, 0
        self._notifier = ClientNotifier(self.client_addresses)

    @property
    def client_addresses(self) -> list[str]:
        return [address.own for address in self.addresses]

    async def start(self, config: EngineConfig, logs: LogOptions) -> None:
        self.epoch += 1
        await self.child.start(
            {
                "config": config,
                "epoch": self.epoch,
                "index": self.index,
                "own_address": self.addresses[0].engine,
                "client_addresses": self.client_addresses,
                "host_free": self._host_free(config),
                "began": time.monotonic(),
                "ready_file": str(self._ready_file),
                "logs": logs,
            }
        )

    def _host_free(self, config: EngineConfig) -> int:
        """What all engines have, which start at the same time; 0 for one that starts alone."""
        return free_host_bytes() if config.data_parallel > 1 and self.epoch == 1 else 0

    def tell_clients(self, code: int) -> None:
        """It has ended with this code."""
        reason = f"{self.name} ended with {describe(code)}"
        self._notifier.engine_down(reason, self.epoch)

    async def tell_clients_of_end(self) -> None:
        """During the drain it is not restarted: clients must not wait for it."""
        if self.child.started:
            self.tell_clients(await self.child.wait())

    def close(self) -> None:
        self._notifier.close()


def gpus_of_engine(config: EngineConfig, gpus: int | None = None) -> int:
    """How many GPUs each of several engines sees: one for each rank, or for --tensor-parallel auto
    its share of all; gpus: those that there are, None: to be counted."""
    if config.tensor_parallel:
        return config.tensor_parallel
    gpus = num_gpus() if gpus is None else gpus
    return max(1, (gpus or 0) // config.data_parallel)


def visible_devices(
    index: int, count: int, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variable that lets an engine see its GPUs: the first engine has the first `count` entries
    of those that we see."""
    seen = listed(os.environ if environment is None else environment)
    first = index * count
    own = map(str, range(first, first + count)) if seen is None else seen[first : first + count]
    return {VISIBLE_DEVICES: ",".join(own)}


def num_gpus(environment: Mapping[str, str] | None = None, devices: Path = DEVICES) -> int | None:
    """GPUs that engines may use; None: not known here."""
    seen = listed(os.environ if environment is None else environment)
    if seen is not None:
        return len(seen)
    found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.iterdir())
    return found or None
