"""OpenTelemetry traces of requests: `pip install wavefill[otel]` and --otlp-traces-endpoint.

    POST /v1/chat/completions    the HTTP request; its parent is the caller's, by `traceparent`
      chat NAME                  from submission to the engine to the end, by GenAI conventions
        queue                    of each completion, as are the next two
        prefill                  from its first step to its first token
        decode                   from its first token to its end

Only the first span begins while the request runs.  The others are made at its end, of times that
are taken anyway, so that a trace costs nothing for each token.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from server.telemetry.summary import Phases, RequestSummary

PROPAGATED = (b"traceparent", b"tracestate")
CLOSE_SECONDS = 5.0
MAX_COMPLETIONS = 16  # of one request that have spans of their own
Headers = list[tuple[bytes, bytes]]


def otlp_provider(endpoint: str) -> TracerProvider:
    """Sends spans in the background.  OTEL_* in the environment say what else there is to say.

    endpoint  /v1/traces is added if it has no path
    Raises ModuleNotFoundError without wavefill[otel].
    """
    # Not imported by name: type checkers and servers without the extra do not know them.
    sdk: Any = import_module("opentelemetry.sdk.trace")
    export: Any = import_module("opentelemetry.sdk.trace.export")
    resources: Any = import_module("opentelemetry.sdk.resources")
    otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    attributes = {"service.version": version("wavefill")}
    named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named and "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = "wavefill"
    provider = sdk.TracerProvider(
        resource=resources.Resource.create(attributes),
        shutdown_on_exit=False,  # which may wait for a collector that is gone
    )
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint)))
    return provider


class Tracing:
    """Begins a trace for each request."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("wavefill", version("wavefill"))
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> RequestTrace:
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in PROPAGATED
        }
        server: tuple[str, int | None] = scope.get("server") or ("", None)
        attributes: dict[str, AttributeValue] = {
            "http.request.method": scope["method"],
            "url.scheme": scope["scheme"],
            "url.path": scope["path"],
            "server.address": server[0],
            **({} if server[1] is None else {"server.port": server[1]}),
        }
        span = self._tracer.start_span(
            scope["method"],
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return RequestTrace(self._tracer, span, scope["method"])

    async def close(self) -> None:
        """Send what has ended, for a few seconds at most."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            shutdown: Any = getattr(self._provider, "shutdown", lambda: None)
            shutdown()
            loop.call_soon_threadsafe(done.set)

        # A thread that the process does not wait for at its end.
        threading.Thread(target=shut_down, name="spans", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await done.wait()
        except TimeoutError:
            pass


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: trace.Tracer, span: Span, method: str) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def headers(self) -> Headers:
        """`traceparent` of the answer: which trace and span the request has become."""
        carrier: dict[str, str] = {}
        context = trace.set_span_in_context(self._span)
        TraceContextTextMapPropagator().inject(carrier, context)
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def end(
        self, route: str | None, status: int, error: str | None, summary: RequestSummary | None
    ) -> None:
        """route: its pattern; error: the code that the request was answered with"""
        span = self._span
        if span.is_recording():
            if summary is not None:
                _generation_spans(self._tracer, trace.set_span_in_context(span), summary, error)
            span.set_attribute("http.response.status_code", status)
            if route is not None:
                span.set_attribute("http.route", route)
                span.update_name(f"{self._method} {route}")
            # A stream that failed had its status before.
            broken = status < 400 and error is not None
            wrong, failed = status >= 400 or broken, status >= 500 or broken
            _note_error(span, error or str(status), failed=failed, wrong=wrong)
        span.end()


def _note_error(span: Span, name: str, *, failed: bool, wrong: bool) -> None:
    """wrong: it did not succeed; failed: by the server's fault"""
    if wrong:
        span.set_attribute("error.type", name)
    if failed:
        span.set_status(Status(StatusCode.ERROR))


def _generation_spans(
    tracer: trace.Tracer, context: Any, summary: RequestSummary, error: str | None
) -> None:
    # Spans have wall-clock times, phases monotonic ones.
    now = time.monotonic()
    offset = time.time_ns() - int(now * 1e9)

    def clock(seconds: float) -> int:
        return int(seconds * 1e9) + offset

    begin = min(phases.arrived for phases in summary.phases)
    end = max(phases.ended or now for phases in summary.phases)
    span = tracer.start_span(
        f"{summary.operation} {summary.model}",
        context=context,
        start_time=clock(begin),
        attributes=_attributes(summary, begin, end),
    )
    failed = "error" in summary.finishes
    _note_error(span, error or "engine_error", failed=failed, wrong=failed)
    inside = trace.set_span_in_context(span)
    for index, phases in enumerate(summary.phases[:MAX_COMPLETIONS]):
        for name, first, last in _phase_times(phases, now):
            phase = tracer.start_span(
                name,
                context=inside,
                start_time=clock(first),
                attributes={"wavefill.completion.index": index},
            )
            phase.end(clock(max(first, last)))
    span.end(clock(end))


def _phase_times(phases: Phases, now: float) -> list[tuple[str, float, float]]:
    """Name, begin and end of each phase that has begun."""
    started, first, ended = phases.started, phases.first_token, phases.ended or now
    found = [("queue", phases.arrived, started or ended)]
    if started:
        found.append(("prefill", started, first or ended))
    if first:
        found.append(("decode", first, ended))
    return found


def _attributes(summary: RequestSummary, begin: float, end: float) -> dict[str, AttributeValue]:
    """By OpenTelemetry's GenAI conventions; the latencies have vLLM's names."""
    params = summary.params
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": summary.operation,
        "gen_ai.provider.name": "wavefill",
        "gen_ai.request.model": summary.model,
        "gen_ai.response.model": summary.model,
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
        "gen_ai.response.finish_reasons": [finish or "running" for finish in summary.finishes],
        "gen_ai.latency.e2e": end - begin,
    }
    if summary.operation != "embeddings":
        attributes |= {
            "gen_ai.request.choice.count": len(summary.phases),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.output_tokens": summary.output_tokens,
        }
    started = [phases.started for phases in summary.phases if phases.started]
    firsts = [phases.first_token for phases in summary.phases if phases.first_token]
    if started:
        attributes["gen_ai.latency.time_in_queue"] = max(0.0, min(started) - begin)
    if firsts:
        attributes["gen_ai.latency.time_to_first_token"] = min(firsts) - begin
    return attributes
