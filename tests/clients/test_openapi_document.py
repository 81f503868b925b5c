"""Requests made up from our own OpenAPI document, right and wrong ones: nothing breaks or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from server.batches.store import BatchStore
from tests.support.server.fake_engine import FakeServer, fake_server
from tests.support.server.qwen_fake_model import TEMPLATE

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")
specs = pytest.importorskip("schemathesis.specs.openapi.checks")

CHECKS = [
    checks.not_a_server_error,
    specs.status_code_conformance,
    specs.content_type_conformance,
    specs.response_schema_conformance,
    specs.negative_data_rejection,
]
SECONDS = 10  # in which every request must be answered


# What the paths of stored things have as the place of an id, and what makes one.
STORED = {
    "/v1/responses/{id}": ("/v1/responses", {"input": "Hi", "background": True}),
    "/v1/chat/completions/{id}": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "store": True},
    ),
    "/v1/requests/{name}": ("/v1/completions", {"prompt": "Hi"}),
}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """It takes files, and its template has a place for tools."""
    folder = tmp_path_factory.mktemp("openapi")
    store = BatchStore(folder / "data", max_bytes=1 << 30)
    with fake_server(folder, template=TEMPLATE.replace("THINKING", ""), batches=store) as fake:
        yield fake
    store.close()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_an_answer_is_one_that_the_document_names(fake: FakeServer, mode: Any):
    document = schemathesis.openapi.from_url(f"{fake.url}/openapi.json")
    positive = mode is schemathesis.GenerationMode.POSITIVE
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 30
    seen: set[tuple[str, int, str]] = set()  # paths, statuses and content types
    for operation in operations:
        # Any text at all is a right one in a path.
        if positive or operation.body or operation.query:
            id = made(fake, operation.path) if positive else None
            try_out(operation, mode, id, seen)
    answer_types = {(status, kind) for _, status, kind in seen}
    assert (400, "application/json") in answer_types
    if positive:
        ok = {path for path, status, _ in seen if status == 200}
        assert {operation.path for operation in operations} == ok
        assert (200, "text/event-stream") in answer_types and (
            200,
            "application/x-ndjson",
        ) in answer_types


def made(fake: FakeServer, path: str) -> str | None:
    """The id of a stored thing that this path is about."""
    if path == "/v1/models/{name}":
        return "fake"
    with httpx.Client(base_url=fake.url) as http:
        for start, (route, body) in STORED.items():
            if path.startswith(start):
                return http.post(route, json={"model": "fake"} | body).json()["id"]
        if not path.startswith(("/v1/files/", "/v1/batches/")):
            return None
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}")}}
        file = http.post("/v1/files", **form).json()["id"]
        body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file}
        return file if "files" in path else http.post("/v1/batches", json=body).json()["id"]


def try_out(operation: Any, mode: Any, id: str | None, seen: set[tuple[str, int, str]]) -> None:
    @settings(
        max_examples=25,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        if mode is schemathesis.GenerationMode.POSITIVE:
            make_likely(case, id, operation.definition.raw)
        answer = case.call_and_validate(checks=CHECKS, timeout=SECONDS)
        kind = answer.headers["content-type"][0].split(";")[0]
        seen.add((operation.path, answer.status_code, kind))

    answered()


def make_likely(case: Any, id: str | None, described: dict[str, Any]) -> None:
    """Put in what no document defines: where most requests would end otherwise."""
    if id is not None:
        case.path_parameters = dict.fromkeys(case.path_parameters, id)
    if not isinstance(case.body, dict):
        return
    content = described["requestBody"]["content"].get("application/json", {})
    if len(case.body) % 2 and "example" in content:
        # Of many fields that were made up at least one goes wrong with another.
        few = dict(list(case.body.items())[:3])
        streams = "text/event-stream" in described["responses"]["200"]["content"]
        case.body = content["example"] | few | ({"stream": True} if streams else {})
    if "model" in case.body:
        case.body["model"] = "fake"
