"""What deploy/ ships, run by the programs that it is for: `make test-deploy`.

A test whose program is not installed is skipped, and says which one.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server.bench_replicas import DRAIN_SECONDS
from benchmarks.server.replica_fleets import Replica, free_ports, smg_command

FOLDER = Path(__file__).parent
ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # which a user's PATH may lack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder have the mark `deploy`, which `make test` leaves out."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker("deploy")


def program(name: str, package: str) -> str:
    """The path of a program; skips the test if it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=ADMIN_PATH)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {package}")
    return found


@pytest.fixture(scope="session")
def nginx_program() -> str:
    return program("nginx", "nginx-light")


@pytest.fixture(scope="session")
def haproxy_program() -> str:
    return program("haproxy", "haproxy")


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
