"""Each HTTP request, as the middleware tells of it: counted, logged, traced.

A line has numbers and names, and nothing that a caller or the model wrote but the path that no
route has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from starlette.types import Scope

from server.http.request_context import CLIENT_GONE, ERROR_CODE, GENERATION, KEY_NAME, REQUEST_ID
from server.metrics.metrics import Metrics
from server.telemetry.summary import RequestSummary

log = logging.getLogger("wavefill.requests")

MAX_PATH = 200  # characters
CLIENT_CLOSED_REQUEST = 499  # nginx's status, which no client sees
Headers = list[tuple[bytes, bytes]]


class Trace(Protocol):
    """The trace of one request; see server.telemetry.tracing."""

    @property
    def trace_id(self) -> str: ...
    def headers(self) -> Headers: ...
    def end(
        self, route: str | None, status: int, error: str | None, summary: RequestSummary | None
    ) -> None: ...


class Tracing(Protocol):
    def begin(self, scope: Scope) -> Trace: ...


class RequestTelemetry:
    """One for each application."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        log_requests: bool,
        tracing: Tracing | None,
        is_routine: Callable[[str], bool],
    ) -> None:
        """is_routine: whether a path is only counted, and logged at level debug"""
        self._metrics = metrics
        self._log_requests = log_requests
        self._tracing = tracing
        self._is_routine = is_routine

    def begin(self, scope: Scope) -> ObservedRequest:
        """The caller has noted the request's id in the scope, and must call `end`."""
        routine = self._is_routine(scope["path"])
        level = logging.DEBUG if routine else logging.INFO
        tracing = None if routine else self._tracing
        return ObservedRequest(
            scope,
            self._metrics,
            None if tracing is None else tracing.begin(scope),
            level=level if self._log_requests and log.isEnabledFor(level) else None,
        )


class ObservedRequest:
    """One HTTP request while it is answered."""

    __slots__ = ("_level", "_metrics", "_scope", "_trace", "began")

    def __init__(
        self, scope: Scope, metrics: Metrics, trace: Trace | None, *, level: int | None
    ) -> None:
        """level: of its line in the log; None for no line"""
        self.began = time.monotonic()
        self._scope = scope
        self._metrics = metrics
        self._trace = trace
        self._level = level

    def headers(self) -> Headers:
        """Of the answer."""
        return [] if self._trace is None else self._trace.headers()

    def end(self, status: int) -> None:
        """Count it, log it, and end its trace."""
        # The pattern of the route that answered: what a caller wrote is never a label.
        route = getattr(self._scope.get("route"), "path", None)
        route = route if isinstance(route, str) else None
        seconds = time.monotonic() - self.began
        self._metrics.http_request(route or "none", status, seconds)
        trace = self._trace
        if trace is None and self._level is None:
            return
        noted: dict[str, Any] = self._scope["state"]
        generation = noted.get(GENERATION)
        summary = None if generation is None else generation.summary()
        if trace is not None:
            trace.end(route, status, noted.get(ERROR_CODE), summary)
        if self._level is not None:
            self._log(self._level, route, status, noted, summary)

    def _log(
        self,
        level: int,
        route: str | None,
        status: int,
        noted: dict[str, Any],
        summary: RequestSummary | None,
    ) -> None:
        scope = self._scope
        fields: dict[str, object] = {
            "method": scope["method"],
            "route": route,
            "path": None if route else quote(scope["path"][:MAX_PATH]),
            "status": status,
            "request_id": noted.get(REQUEST_ID),
            "trace_id": None if self._trace is None else self._trace.trace_id,
            "key": noted.get(KEY_NAME),
            "error": noted.get(ERROR_CODE),
            **_generated(summary, self.began),
            "total_ms": _milliseconds(time.monotonic() - self.began),
            "client_gone": status == CLIENT_CLOSED_REQUEST or bool(noted.get(CLIENT_GONE)),
        }
        log.log(level, "request", extra={"fields": fields})


def _generated(summary: RequestSummary | None, began: float) -> dict[str, object]:
    """The fields of what was generated; all null if nothing was submitted to the engine."""
    if summary is None:
        names = ("model", "prompt_tokens", "cached_tokens", "output_tokens", "queue_ms", "ttft_ms")
        return {name: None for name in (*names, "finish_reason")}
    queues = [each.started - each.arrived for each in summary.phases if each.started]
    firsts = [each.first_token for each in summary.phases if each.first_token]
    finishes = dict.fromkeys(finish or "running" for finish in summary.finishes)
    return {
        "model": summary.model,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "output_tokens": summary.output_tokens,
        "queue_ms": _milliseconds(min(queues)) if queues else None,
        "ttft_ms": _milliseconds(min(firsts) - began) if firsts else None,
        "finish_reason": ",".join(finishes),
    }


def _milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 2)
