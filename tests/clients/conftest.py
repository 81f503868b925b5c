"""What others wrote, against a server of ours: `make test-clients`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.server.server_process import Server, start_server, stop_server

# None of these may speak to anyone but the server that is tested.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
}


def asked_for(config: pytest.Config) -> bool:
    return any("clients" in str(argument) for argument in config.invocation_params.args)


def pytest_configure(config: pytest.Config) -> None:
    # Newer releases warn of what they do themselves, which is no fault of ours.
    if asked_for(config):
        config.addinivalue_line("filterwarnings", "default")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only when asked for by name: what they import takes seconds and is not always there."""
    return None if asked_for(config) else True


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model, which calls tools by itself."""
    server = start_server(tmp_path_factory.mktemp("clients") / "log")
    yield server
    stop_server(server)
