"""--log-requests: one line for each request, with what it was and how it ended."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer, fake_server

NAMED = "sk-of-alice"
UNNAMED = "sk-of-nobody"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    keys = (f"alice {NAMED}", UNNAMED)
    folder = tmp_path_factory.mktemp("tokenizer")
    with fake_server(folder, log_requests=True, api_keys=keys) as server:
        yield server


class Lines:
    """The fields of the lines that were logged."""

    def __init__(self, server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "wavefill.requests")
        self._server = server
        self._caplog = caplog

    def all(self) -> list[dict[str, Any]]:
        records = [r for r in self._caplog.records if r.name == "wavefill.requests"]
        return [record.fields for record in records]  # type: ignore[attr-defined]

    def one(self) -> dict[str, Any]:
        """The only one, as soon as it is there: it is written after the answer."""
        for _ in range(500):
            if found := self.all():
                (line,) = found
                return line
            time.sleep(0.01)
        raise AssertionError("no line")

    def post(self, path: str, key: str = NAMED, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers["x-request-id"] = "my-request"
        body = {"model": "fake", **body}
        return httpx.post(self._server.url + path, json=body, headers=headers)

    def leave(self, path: str, *, stream: bool) -> None:
        """Ask, and close the connection after the first bytes, or for too long without any."""
        headers = {"authorization": f"Bearer {NAMED}"}
        body = {"model": "fake", "prompt": "The fox", "max_tokens": 40, "stream": stream}
        url = self._server.url + path
        asked = httpx.stream("POST", url, json=body, headers=headers, timeout=0.4)
        with suppress(httpx.ReadTimeout), asked as answer:
            next(answer.iter_bytes())


@pytest.fixture
def lines(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> Lines:
    return Lines(fake, caplog)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one_line_with_its_tokens_times_and_end(
    lines: Lines, fake: FakeServer, stream: bool
):
    fake.engine.cached, fake.engine.delay = 1, 0.01
    answer = lines.post("/v1/completions", prompt="The fox", max_tokens=3, stream=stream)
    assert answer.status_code == 200
    line = lines.one()
    times = {name: line.pop(name) for name in ("queue_ms", "ttft_ms", "total_ms")}
    assert 0 <= times["queue_ms"] <= times["ttft_ms"] <= times["total_ms"]
    assert line == {
        "method": "POST",
        "route": "/v1/completions",
        "path": None,
        "status": 200,
        "request_id": "my-request",
        "trace_id": None,
        "key": "alice",
        "error": None,
        "model": "fake",
        "prompt_tokens": len(fake.tokenizer.encode("The fox")),
        "cached_tokens": 1,
        "output_tokens": 3,
        "finish_reason": "length",
        "client_gone": False,
    }


def test_all_completions_of_a_request_are_in_its_line(lines: Lines):
    lines.post("/v1/completions", prompt=["The", "fox"], n=2, max_tokens=2)
    line = lines.one()
    assert (line["output_tokens"], line["finish_reason"]) == (8, "length")


def test_embeddings_have_a_line_without_output(lines: Lines):
    lines.post("/v1/embeddings", input=["The", "fox"])
    line = lines.one()
    assert (line["output_tokens"], line["ttft_ms"], line["finish_reason"]) == (0, None, "stop")
    assert line["prompt_tokens"] >= 2
    assert line["queue_ms"] is not None


@pytest.mark.parametrize(("stream", "status"), [(False, 499), (True, 200)])
def test_a_client_that_leaves_is_named_in_the_line(
    lines: Lines, fake: FakeServer, stream: bool, status: int
):
    fake.engine.delay = 0.05
    fake.engine.reply = lambda request: [5] * 40
    lines.leave("/v1/completions", stream=stream)
    line = lines.one()
    assert (line["status"], line["finish_reason"], line["client_gone"]) == (status, "abort", True)


def test_a_refused_request_has_a_line_with_its_code(lines: Lines):
    assert lines.post("/v1/completions", model="other", prompt="The fox").status_code == 404
    line = lines.one()
    assert (line["status"], line["error"]) == (404, "model_not_found")
    assert line["model"] is line["prompt_tokens"] is line["finish_reason"] is None


@pytest.mark.parametrize(
    ("path", "key", "body", "status", "error"),
    [
        ("/v1/completions", "wrong", {"prompt": "The"}, 401, "invalid_api_key"),
        ("/v1/completions", "", {"prompt": "The"}, 401, "invalid_request_error"),
        ("/v1/completion", NAMED, {}, 404, "not_found"),
        ("/v1/models", NAMED, {}, 405, "method_not_allowed"),
        ("/v1/completions", NAMED, {"prompt": "x" * 50_000_000}, 413, "request_too_large"),
    ],
)
def test_whatever_refuses_a_request_its_line_has_the_code(
    lines: Lines, path: str, key: str, body: dict[str, Any], status: int, error: str
):
    assert lines.post(path, key, **body).status_code == status
    line = lines.one()
    assert (line["status"], line["error"]) == (status, error)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "The fox"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
@pytest.mark.parametrize(("stream", "status"), [(False, 500), (True, 200)])
def test_an_answer_that_fails_has_a_line_with_the_code(
    lines: Lines, fake: FakeServer, path: str, asked: dict[str, Any], stream: bool, status: int
):
    fake.engine.fail_after = 1
    assert lines.post(path, stream=stream, **asked).status_code == status
    line = lines.one()
    assert (line["status"], line["error"]) == (status, "engine_error")
    assert line["finish_reason"] == "error"


def test_a_fault_of_our_own_has_a_line_with_the_code(
    lines: Lines, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fake.engine, "submit", None)
    assert lines.post("/v1/completions", prompt="The fox").status_code == 500
    line = lines.one()
    assert (line["status"], line["error"]) == (500, "internal_error")


def test_a_key_without_a_name_is_told_by_its_digest_and_never_itself(
    lines: Lines, caplog: pytest.LogCaptureFixture
):
    assert lines.post("/v1/completions", UNNAMED, prompt="The", max_tokens=1).status_code == 200
    assert lines.one()["key"] == hashlib.sha256(UNNAMED.encode()).hexdigest()[:8]
    assert UNNAMED not in caplog.text and NAMED not in caplog.text


def test_a_name_opens_nothing_and_belongs_to_no_key(lines: Lines):
    for wrong in ("alice", f"alice {NAMED}", "wrong"):
        assert lines.post("/v1/completions", wrong, prompt="The").status_code == 401
    time.sleep(0.05)
    assert [line["key"] for line in lines.all()] == [None] * 3


def test_a_path_without_a_route_is_one_word_and_short(lines: Lines, fake: FakeServer):
    headers = {"authorization": f"Bearer {NAMED}"}
    answer = httpx.get(f"{fake.url}/nothing%0A%22here/{'x' * 500}", headers=headers)
    assert answer.status_code == 404
    line = lines.one()
    assert line["route"] is None and line["path"].startswith("/nothing%0A%22here/xxx")
    assert len(line["path"]) < 250


def test_probes_and_scrapes_have_no_lines(lines: Lines, fake: FakeServer):
    headers = {"authorization": f"Bearer {NAMED}"}
    for path in ("/health", "/livez", "/readyz", "/metrics", "/v1/models"):
        assert httpx.get(fake.url + path, headers=headers).status_code == 200
    assert lines.one()["route"] == "/v1/models"


def test_pages_and_their_files_have_no_lines_and_probes_have_them_at_level_debug(
    lines: Lines, fake: FakeServer, caplog: pytest.LogCaptureFixture
):
    paths = ("/", "/pages/playground/main.js", "/static/swagger-ui.css")
    for path in paths:
        assert httpx.get(fake.url + path).status_code == 200
    caplog.set_level(logging.DEBUG, "wavefill.requests")
    assert httpx.get(f"{fake.url}/readyz").status_code == 200
    assert lines.one()["route"] == "/readyz"
    assert caplog.records[-1].levelno == logging.DEBUG


def test_no_line_without_the_option(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "wavefill.requests")
    with fake_server(tmp_path) as fake:
        assert httpx.get(f"{fake.url}/v1/models").status_code == 200
    assert [record for record in caplog.records if record.name == "wavefill.requests"] == []
