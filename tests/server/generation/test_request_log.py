"""Timings in answers, GET /v1/requests/{id}, and the headers that report the queue."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import orjson
import pytest
import uvicorn

from runtime.messages import EngineRequest, RequestOutput
from server.app import create_app
from server.generation.generation import MAX_CHOICES
from server.generation.request_log import RequestLog
from server.http.request_context import exchange
from server.loaded_model import LoadedModel
from server.metrics.metrics import Metrics
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState
from tests.support.server.fake_engine import FakeEngine, FakeServer, fake_config, write_tokenizer

TIMES = {
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
    "total_seconds",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "preemptions",
    "mean_batch_size",
}


@pytest.fixture
def engine_with_timings(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last Output says what the engine says of a request."""
    plain = fake.engine._outputs

    def outputs(request: EngineRequest) -> Iterator[RequestOutput]:
        for output in plain(request):
            if output.finish is not None:
                began = request.arrived
                events = [(began + 0.5, 512), (began + 1.25, 0), (began + 2.0, 600)]
                output = msgspec.structs.replace(
                    output, preemptions=2, mean_batch=3.456, events=events
                )
            yield output

    monkeypatch.setattr(fake.engine, "_outputs", outputs)


def ask(fake: FakeServer, *, id: str = "", **fields: Any) -> httpx.Response:
    headers = {"x-request-id": id} if id else {}
    body = {"model": "fake", "prompt": "The fox", **fields}
    return httpx.post(f"{fake.url}/v1/completions", json=body, headers=headers)


def get_record(fake: FakeServer, id: str, **options: Any) -> httpx.Response:
    return httpx.get(f"{fake.url}/v1/requests/{id}", **options)


def when(fake: FakeServer, id: str, state: str) -> dict[str, Any]:
    """The record, as soon as it says so."""
    for _ in range(500):
        record = get_record(fake, id)
        if record.status_code == 200 and record.json()["state"] == state:
            return record.json()
        time.sleep(0.01)
    raise AssertionError(record.text)


@pytest.mark.usefixtures("engine_with_timings")
def test_timings_are_in_each_choice(fake: FakeServer):
    fake.engine.cached = 1
    choices = ask(fake, timings=True, n=2, max_tokens=5).json()["choices"]
    for choice in choices:
        times = choice["timings"]
        assert set(times) == TIMES
        assert (times["preemptions"], times["mean_batch_size"]) == (2, 3.46)
        assert (times["prompt_tokens"], times["cached_tokens"]) == (2, 1)
        assert times["completion_tokens"] == 5
        phases = ("queue_seconds", "prefill_seconds", "decode_seconds")
        assert sum(times[phase] for phase in phases) == pytest.approx(
            times["total_seconds"], abs=1e-4
        )


@pytest.mark.usefixtures("engine_with_timings")
def test_a_streams_timings_come_with_its_finish(fake: FakeServer):
    text = ask(fake, timings=True, stream=True, max_tokens=3).text
    chunks = [orjson.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    times = ["timings" in chunk["choices"][0] for chunk in chunks]
    assert times == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["timings"]["mean_batch_size"] == 3.46


def test_timings_are_sent_only_on_request(fake: FakeServer):
    assert "timings" not in ask(fake).json()["choices"][0]
    assert "timings" not in ask(fake, timings=False).json()["choices"][0]


def test_what_the_engine_does_not_report_is_null(fake: FakeServer):
    fake.say("Hello, world!")
    [choice] = ask(fake, timings=True, stop="wor", max_tokens=50).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["timings"]["preemptions"] is None
    assert choice["timings"]["mean_batch_size"] is None
    assert choice["timings"]["total_seconds"] > 0


def test_a_request_is_found_by_either_of_its_names(fake: FakeServer):
    answer = ask(fake, id="my-own:1", max_tokens=3)
    by_header = get_record(fake, "my-own:1").json()
    assert get_record(fake, answer.json()["id"]).json() == by_header
    assert get_record(fake, answer.json()["id"].removeprefix("cmpl-")).json() == by_header
    assert by_header["request_id"] == answer.headers["x-request-id"] == "my-own:1"
    assert answer.json()["id"] == f"cmpl-{by_header['id']}"


@pytest.mark.usefixtures("engine_with_timings")
def test_a_record_has_numbers_and_no_text(fake: FakeServer):
    fake.say("sesame")
    ask(fake, id="secret", prompt="quick brown", n=2, max_tokens=50, seed=4)
    response = get_record(fake, "secret")
    assert not any(word in response.text for word in ("sesame", "quick", "brown"))
    record = response.json()
    assert (record["state"], record["model"], record["stream"]) == ("finished", "fake", False)
    assert record["route"] == "completions" and abs(record["created"] - time.time()) < 60
    generated = [choice["completion_tokens"] for choice in record["choices"]]
    assert record["usage"]["completion_tokens"] == sum(generated) > 0
    for index, choice in enumerate(record["choices"]):
        assert set(choice) == TIMES | {"index", "finish_reason", "events"}
        assert choice["events"] == [
            {"seconds": 0.5, "prefill_tokens": 512},
            {"seconds": 1.25, "preempted": True},
            {"seconds": 2.0, "prefill_tokens": 600},
        ]
        assert (choice["index"], choice["finish_reason"]) == (index, "stop")
        assert choice["preemptions"] == 2


def test_a_chat_is_explained_as_well(fake: FakeServer):
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    url = f"{fake.url}/v1/chat/completions"
    assert httpx.post(url, json=body, headers={"x-request-id": "a-chat"}).status_code == 200
    record = get_record(fake, "a-chat").json()
    assert (record["route"], record["choices"][0]["finish_reason"]) == ("chat", "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/generate", {"prompt": "Hi", "raw": True}),
    ],
)
def test_requests_of_other_api_adapters_are_logged_too(
    fake: FakeServer, path: str, body: dict[str, Any], stream: bool
):
    answer = httpx.post(fake.url + path, json={"model": "fake", "stream": stream} | body)
    assert answer.status_code == 200
    record = get_record(fake, answer.headers["x-request-id"]).json()
    assert (record["state"], record["stream"]) == ("finished", stream)
    names = re.findall(r'"id": ?"((?:resp|msg)_\w+)"', answer.text)
    if path.startswith("/v1/"):
        assert get_record(fake, names[0]).json() == record


def test_a_response_in_the_background_is_found(fake: FakeServer):
    body = {"model": "fake", "input": "Hi", "background": True}
    made = httpx.post(f"{fake.url}/v1/responses", json=body).json()
    assert when(fake, made["id"], "finished")["usage"]["completion_tokens"] > 0


def test_a_request_can_be_watched_from_queue_to_end(fake: FakeServer):
    fake.engine.held = True
    asking = threading.Thread(target=ask, args=(fake,), kwargs={"id": "slow", "max_tokens": 4})
    asking.start()
    queued = when(fake, "slow", "queued")
    assert queued["choices"][0]["finish_reason"] is None
    assert queued["choices"][0]["queue_seconds"] is None
    fake.engine.delay, fake.engine.held = 0.05, False
    running = when(fake, "slow", "running")
    assert 1 <= running["usage"]["completion_tokens"] < 4
    assert running["choices"][0]["total_seconds"] is None
    asking.join()
    assert when(fake, "slow", "finished")["usage"]["completion_tokens"] == 4


def test_a_request_that_failed_says_so(fake: FakeServer):
    fake.engine.fail_after = 1
    assert ask(fake, id="failing", n=2).status_code == 500
    assert get_record(fake, "failing").json()["state"] == "failed"


def test_a_request_whose_caller_left_says_so(fake: FakeServer):
    fake.engine.held = True
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": "fake", "prompt": "x"}
        url = f"{fake.url}/v1/completions"
        httpx.post(url, json=body, headers={"x-request-id": "left"}, timeout=0.2)
    assert when(fake, "left", "aborted")["choices"][0]["finish_reason"] == "abort"


def test_only_some_of_many_choices_are_kept(fake: FakeServer):
    ask(fake, id="many", n=MAX_CHOICES + 4, max_tokens=1)
    record = get_record(fake, "many").json()
    assert (record["num_choices"], len(record["choices"])) == (MAX_CHOICES + 4, MAX_CHOICES)
    assert record["usage"]["completion_tokens"] == MAX_CHOICES + 4


@pytest.mark.parametrize("id", ["nobody", "cmpl-" + "0" * 32, "x" * 5000, "%00", "-", "a%20b"])
def test_an_unknown_request_is_404(fake: FakeServer, id: str):
    answer = get_record(fake, id)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("request_not_found", "invalid_request_error")
    assert "the last 1000 are remembered" in error["message"] and len(error["message"]) < 300


def test_a_refused_request_leaves_no_record(fake: FakeServer):
    assert ask(fake, id="refused", temperature=9).status_code == 400
    assert get_record(fake, "refused").status_code == 404


def log_of(limit: int, count: int) -> RequestLog:
    log = RequestLog(limit)
    for number in range(count):
        exchange.set({"request_id": f"id-{number}"})
        log.begin(f"{number:032x}", {}, lambda: {"state": "running"}).end()
    exchange.set({})
    return log


def test_the_oldest_record_makes_room():
    log = log_of(3, 5)
    assert [log.find(f"id-{number}", b"") is None for number in range(5)] == [
        True, True, False, False, False]  # fmt: skip
    assert log.find(f"cmpl-{4:032x}", b"") == log.find("id-4", b"")
    assert len(log._records) == 3 and len(log._by_id) == 6


def test_a_history_of_none_remembers_none():
    log = log_of(0, 2)
    assert log.find("id-1", b"") is None and not log._by_id


def test_of_two_requests_of_one_id_the_newer_is_shown_and_outlives_the_older():
    log = RequestLog(2)
    exchange.set({"request_id": "same"})
    for number in range(3):
        log.begin(f"name{number}", {"number": number}, dict)
    exchange.set({})
    found = log.find("same", b"")
    assert found is not None and found["number"] == 2
    assert len(log._by_id) == 3


def test_a_request_without_an_id_is_not_found():
    log = RequestLog()
    exchange.set({})
    log.begin("name", {}, dict)
    assert log.find("", b"") is None
    assert log.find("name", b"") is not None


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """A server with two keys; its URL."""
    folder = write_tokenizer(tmp_path)
    config = fake_config(api_keys=("ann", "bob"))
    engine = FakeEngine(reply=lambda request: [1, 2])
    state = ServerState(config, engine, LoadedModel(ChatTokenizer.load(folder)), Metrics())
    settings = uvicorn.Config(create_app(state), log_config=None, lifespan="off", port=0)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    [listener] = server.servers[0].sockets
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def test_each_key_sees_its_own_requests_only(guarded: str):
    def call(method: str, path: str, key: str, id: str = "", **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | ({"x-request-id": id} if id else {})
        return httpx.request(method, guarded + path, headers=headers, **options)

    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
    ids = [
        call("POST", "/v1/completions", key, "same", json=body).json()["id"]
        for key in ("ann", "bob")
    ]
    for key, other, own in (("ann", ids[1], ids[0]), ("bob", ids[0], ids[1])):
        assert call("GET", f"/v1/requests/{own}", key).status_code == 200
        assert call("GET", f"/v1/requests/{other}", key).status_code == 404
        assert own == f"cmpl-{call('GET', '/v1/requests/same', key).json()['id']}"
    assert call("GET", f"/v1/requests/{ids[0]}", "eve").status_code == 401


def test_the_queue_is_reported_in_headers(fake: FakeServer):
    headers = ask(fake, max_tokens=1).headers
    assert headers["x-ratelimit-limit-requests"] == "200"
    assert headers["x-ratelimit-remaining-requests"] == "200"  # its own has ended
    assert headers["x-ratelimit-reset-requests"] == "0s"
    assert headers["openai-processing-ms"].isdigit()
    assert headers["x-request-id"]


def test_a_full_queue_leaves_nothing_and_says_when_to_come_back(fake: FakeServer):
    fake.engine.held = True
    asking = threading.Thread(target=ask, args=(fake,), kwargs={"n": 100, "prompt": ["a", "b"]})
    asking.start()
    while fake.engine.pending < 200:
        time.sleep(0.01)
    answer = ask(fake)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert answer.headers["x-ratelimit-reset-requests"] == "1s"
    fake.engine.held = False
    asking.join()


def test_a_stream_says_how_much_is_left_while_it_runs(fake: FakeServer):
    fake.engine.delay = 0.01
    headers = ask(fake, stream=True, max_tokens=5).headers
    assert headers["x-ratelimit-remaining-requests"] == "199"


def test_routes_without_a_queue_have_no_such_headers(fake: FakeServer):
    for path in ("/v1/models", "/health", "/v1/requests/x"):
        headers = httpx.get(fake.url + path).headers
        assert not [name for name in headers if name.startswith("x-ratelimit")]
