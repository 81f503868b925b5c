"""Traces of requests: their spans, names, parents and times, and that nothing is traced unasked."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from server.telemetry.tracing import Tracing
from tests.support.server.fake_engine import FakeServer, fake_server

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'wavefill[otel]'")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, exporter: InMemorySpanExporter
) -> Iterator[FakeServer]:
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    folder = tmp_path_factory.mktemp("tokenizer")
    with fake_server(folder, tracing=Tracing(provider)) as server:
        yield server


class Spans:
    def __init__(self, server: FakeServer, exporter: InMemorySpanExporter) -> None:
        exporter.clear()
        self._server = server
        self._exporter = exporter

    def post(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"model": "fake", "prompt": "The fox", **body}
        return httpx.post(f"{self._server.url}/v1/completions", json=body, headers=headers)

    def ended(self, count: int) -> list[Any]:
        """In the order of their begin, as soon as there are so many."""
        for _ in range(500):
            found = self._exporter.get_finished_spans()
            if len(found) >= count:
                assert len(found) == count
                return sorted(found, key=lambda span: (span.start_time, -span.end_time))
            time.sleep(0.01)
        raise AssertionError(found)


@pytest.fixture
def spans(fake: FakeServer, exporter: InMemorySpanExporter) -> Spans:
    return Spans(fake, exporter)


def tree(spans: list[Any]) -> dict[str, str | None]:
    """The name of each span, and of its parent."""
    names = {span.context.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent.span_id) if span.parent else None for span in spans}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_spans_for_its_phases_inside_the_callers_trace(
    spans: Spans, fake: FakeServer, stream: bool
):
    fake.engine.delay = 0.01
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    answer = spans.post(headers, max_tokens=3, stream=stream)
    found = spans.ended(5)
    assert tree(found) == {
        "POST /v1/completions": None,
        "text_completion fake": "POST /v1/completions",
        "queue": "text_completion fake",
        "prefill": "text_completion fake",
        "decode": "text_completion fake",
    }
    assert {format(span.context.trace_id, "032x") for span in found} == {TRACE_ID}
    by_name = {span.name: span for span in found}
    server = by_name["POST /v1/completions"]
    assert format(server.parent.span_id, "016x") == CALLER
    assert server.kind == SpanKind.SERVER
    assert server.attributes["http.route"] == "/v1/completions"
    assert server.attributes["http.response.status_code"] == 200
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{server.context.span_id:016x}-01"
    generated = by_name["text_completion fake"]
    assert generated.attributes["gen_ai.usage.output_tokens"] == 3
    assert generated.attributes["gen_ai.request.max_tokens"] == 3
    assert generated.attributes["gen_ai.response.finish_reasons"] == ("length",)
    for outer, inner in (("POST /v1/completions", generated.name), (generated.name, "decode")):
        assert by_name[outer].start_time <= by_name[inner].start_time + 1_000_000
        assert by_name[inner].end_time <= by_name[outer].end_time + 1_000_000
    assert by_name["prefill"].end_time == by_name["decode"].start_time
    assert by_name["decode"].end_time - by_name["decode"].start_time > 0.015e9


def test_a_request_without_a_trace_begins_one(spans: Spans):
    answer = spans.post(max_tokens=1)
    (server,) = (span for span in spans.ended(5) if span.kind == SpanKind.SERVER)
    assert server.parent is None
    assert answer.headers["traceparent"].split("-")[1] == format(server.context.trace_id, "032x")


def test_each_completion_has_its_own_phases(spans: Spans):
    spans.post(n=2, max_tokens=2)
    found = spans.ended(2 + 2 * 3)
    queues = [span for span in found if span.name == "queue"]
    assert {span.attributes["wavefill.completion.index"] for span in queues} == {0, 1}


def test_a_callers_decision_not_to_sample_is_kept(spans: Spans):
    answer = spans.post({"traceparent": f"00-{TRACE_ID}-{CALLER}-00"}, max_tokens=1)
    assert answer.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert answer.headers["traceparent"].endswith("-00")
    assert spans.ended(0) == []


def test_a_refused_request_has_one_span_with_the_error(spans: Spans):
    assert spans.post(model="other").status_code == 404
    (span,) = spans.ended(1)
    assert span.attributes["error.type"] == "model_not_found"
    assert span.status.status_code == StatusCode.UNSET, "the caller's fault"


def test_an_engine_that_fails_is_an_error_of_the_server(spans: Spans, fake: FakeServer):
    fake.engine.fail_after = 0
    assert spans.post().status_code == 500
    found = {span.name: span for span in spans.ended(3)}
    assert found["POST /v1/completions"].status.status_code == StatusCode.ERROR
    assert found["text_completion fake"].attributes["error.type"] == "engine_error"


def test_a_stream_that_breaks_off_is_an_error_of_the_server(spans: Spans, fake: FakeServer):
    fake.engine.fail_after = 1
    assert spans.post(stream=True).status_code == 200
    (span,) = (each for each in spans.ended(5) if each.kind == SpanKind.SERVER)
    assert span.status.status_code == StatusCode.ERROR
    assert span.attributes["error.type"] == "engine_error"


def test_probes_have_no_spans(spans: Spans, fake: FakeServer):
    for path in ("/health", "/livez", "/metrics"):
        assert "traceparent" not in httpx.get(fake.url + path).headers
    assert spans.ended(0) == []


def test_nothing_of_the_sdk_is_loaded_by_a_server_without_traces():
    code = (
        "import sys, server.app, server.process.api_process; "
        "found = {'opentelemetry.sdk', 'opentelemetry.exporter'} & sys.modules.keys(); "
        "assert not found and 'server.telemetry.tracing' not in sys.modules, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
