"""EngineProcess: one engine of the launcher, its sockets, its restarts, and its GPU."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from runtime.config import EngineConfig
from runtime.ipc.client import ClientNotifier, EngineAddress
from server.process.child import Child, describe

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


class EngineProcess:
    def __init__(
        self, index: int, config: EngineConfig, module: str, directory: Path, num_clients: int
    ) -> None:
        """directory: of the sockets; num_clients: API processes"""
        several = config.data_parallel > 1
        name = f"engine {index}" if several else "the engine"
        variables: dict[str, str] = {}
        if several and config.device != "cpu":
            variables = visible_devices(index, config.tensor_parallel)
        self.name = name if several else "the engine process"
        self.child = Child(name, module, variables=variables)
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

    async def start(self, config: EngineConfig) -> None:
        self.epoch += 1
        await self.child.start(
            {
                "config": config,
                "epoch": self.epoch,
                "index": self.index,
                "own_address": self.addresses[0].engine,
                "client_addresses": self.client_addresses,
                "began": time.monotonic(),
            }
        )

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


def visible_devices(
    index: int, ranks: int, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variable that lets an engine see its GPUs, one for each rank: the first engine has the
    first `ranks` entries of those that we see."""
    seen, first = _listed(environment), index * ranks
    own = map(str, range(first, first + ranks)) if seen is None else seen[first : first + ranks]
    return {VISIBLE_DEVICES: ",".join(own)}


def num_gpus(environment: Mapping[str, str] | None = None, devices: Path = DEVICES) -> int | None:
    """GPUs that engines may use; None: not known here."""
    seen = _listed(environment)
    if seen is not None:
        return len(seen)
    found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.iterdir())
    return found or None


def _listed(environment: Mapping[str, str] | None) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None if it is not set."""
    value = (os.environ if environment is None else environment).get(VISIBLE_DEVICES)
    return None if value is None else [entry for entry in value.split(",") if entry.strip()]
