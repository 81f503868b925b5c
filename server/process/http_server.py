"""The HTTP server of an API process: uvicorn, with our connections and without its signals."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from server.config import ServerConfig
from server.http.connection import BoundedProtocol
from server.http.connection_limit import ConnectionLimit, max_connections
from server.http.unread import UnreadAnswers
from server.metrics.metrics import Metrics


class ApiServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would close the listener before streams end."""

    def __init__(self, config: uvicorn.Config, limit: ConnectionLimit) -> None:
        super().__init__(config)
        self.limit = limit
        self.servers = []  # until it starts

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def http_server(app: ASGIApp, config: ServerConfig, metrics: Metrics) -> ApiServer:
    limit = ConnectionLimit(max_connections())
    protocol = partial(BoundedProtocol, limit=limit, unread=UnreadAnswers(metrics.answer_unread))
    return ApiServer(
        uvicorn.Config(
            app,
            http=cast(Any, protocol),  # uvicorn calls it for each connection
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            h11_max_incomplete_event_size=config.max_header_bytes,  # BoundedProtocol reads it
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        ),
        limit,
    )
