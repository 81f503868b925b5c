"""`wavefill bench serve`: its arithmetic, its reading of streams, and whole runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.bench.client import Lines, Recorder
from server.bench.metrics import Answer, Failure, Objectives, percentile, spread, summarize
from server.bench.share import Share, shares
from server.bench.workload import Workload, poisson_arrivals
from server.cli import UsageError, main
from server.commands.bench import read_objectives

ROOT = Path(__file__).parent.parent.parent


def answer(start: float, *deliveries: float, prompt: int = 10, output: int = 3) -> Answer:
    return Answer(start, deliveries, prompt, 0, output)


def test_times_are_taken_from_the_first_and_the_last_delivery() -> None:
    one = answer(10.0, 10.5, 10.6, 11.5, output=11)
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.5)
    assert one.tpot == pytest.approx(0.1), "1.0 s for the ten tokens after the first"
    assert one.itl == pytest.approx([0.1, 0.9])


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    assert answer(0.0, 0.5, output=1).tpot is None
    assert summarize([answer(0.0, 0.5, output=1)], Objectives()).tpot_ms is None


def test_percentiles_lie_between_their_neighbours_as_numpy_says() -> None:
    numpy = pytest.importorskip("numpy")
    draw = random.Random(1)
    for count in (1, 2, 3, 10, 101):
        values = sorted(draw.random() for _ in range(count))
        for percent in (0, 50, 90, 99, 100):
            assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_spread_is_in_milliseconds_and_nothing_has_none() -> None:
    found = spread([0.002, 0.001])
    assert found is not None and (found.mean, found.p50) == pytest.approx((1.5, 1.5))
    assert spread([]) is None


def test_throughput_counts_usage_over_the_whole_run_and_failures_add_nothing() -> None:
    outcomes = [
        answer(100.0, 101.0, 102.0, prompt=30, output=40),
        answer(101.0, 103.0, 104.0, prompt=10, output=20),
        Failure("HTTP 429", "full"),
        Failure("HTTP 429", "full"),
        Failure("timeout", "late"),
    ]
    summary = summarize(outcomes, Objectives())
    assert (summary.completed, summary.failed) == (2, 3)
    assert summary.errors == {"HTTP 429": 2, "timeout": 1}
    assert summary.duration_s == pytest.approx(4.0)
    assert summary.output_tokens_per_s == pytest.approx(15.0)
    assert summary.total_tokens_per_s == pytest.approx(25.0)
    assert summary.good_requests_per_s is None, "no limits were given"


def test_a_run_without_answers_has_zero_throughput_and_no_spreads() -> None:
    summary = summarize([Failure("timeout", "late")], Objectives(ttft=1.0))
    assert (summary.duration_s, summary.output_tokens_per_s, summary.ttft_ms) == (0.0, 0.0, None)
    assert summary.good_requests_per_s == 0.0


def test_goodput_counts_the_requests_that_keep_every_limit() -> None:
    quick, late, slow = (
        answer(0.0, 0.1, 0.2, output=2),
        answer(0.0, 0.9, 1.0, output=2),
        answer(0.0, 0.1, 1.0, output=2),
    )
    limits = Objectives(ttft=200.0, tpot=150.0)
    assert [limits.met(one) for one in (quick, late, slow)] == [True, False, False]
    assert summarize([quick, late, slow], limits).good_requests_per_s == pytest.approx(1.0)


def test_objectives_are_read_and_others_are_refused_by_name() -> None:
    assert read_objectives(["ttft:200", "e2e:1.5"]) == Objectives(ttft=200.0, e2e=1.5)
    for wrong in ("itl:3", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf"):
        with pytest.raises(UsageError, match=f"--goodput {wrong}"):
            read_objectives([wrong])


def test_arrivals_have_the_asked_rate_exponential_gaps_and_a_seed() -> None:
    times = list(poisson_arrivals(50.0, 20_000, seed=3))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # An exponential's deviation equals its mean; of even gaps it would be 0.
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)
    assert times == list(poisson_arrivals(50.0, 20_000, seed=3))
    assert times != list(poisson_arrivals(50.0, 20_000, seed=4))


def workload(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "endpoint": "completions",
        "model": "m",
        "input_len": 7,
        "output_len": 5,
        "vocab_size": 1000,
        "ignore_eos": False,
        "temperature": 0.0,
        "seed": 0,
    }
    return Workload(**(fields | changes))


def test_prompts_have_the_asked_length_and_repeat_only_with_their_seed() -> None:
    body = workload().body(0)
    ids = body["prompt"]
    assert isinstance(ids, list) and len(ids) == 7
    assert all(100 <= token < 1000 for token in ids)
    assert workload().body(0) == body
    others = [workload().body(1), workload(seed=1).body(0), workload().body(0, "warm-up")]
    assert all(other["prompt"] != ids for other in others)
    text = workload(endpoint="chat", vocab_size=None).body(0)["messages"]
    assert isinstance(text, list) and len(text[0]["content"].split()) == 7


def test_ignore_eos_is_sent_only_when_asked() -> None:
    assert "ignore_eos" not in workload().body(0)
    assert workload(ignore_eos=True).body(0)["ignore_eos"] is True


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_the_bytes_are_cut(size: int) -> None:
    stream = 'data: {"a": "ü"}\n\n: ping\r\n\r\nevent: x\ndata:{"b": 1}\r\n\r\ndata: [DONE]\n\n'
    raw, lines = stream.encode(), Lines()
    cut = [raw[i : i + size] for i in range(0, len(raw), size)]
    found = [data for piece in cut for data in lines.feed(piece)]
    assert found == ['{"a": "ü"}'.encode(), b'{"b": 1}', b"[DONE]"]


USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


def record(*messages: object, done: bool = True) -> Answer | Failure:
    recorder = Recorder(start=1.0)
    for now, message in enumerate(messages, start=2):
        recorder.event(json.dumps(message).encode(), float(now))
    if done:
        recorder.event(b"[DONE]", 99.0)
    return recorder.outcome()


def choices(**choice: object) -> dict[str, object]:
    return {"choices": [{"index": 0} | choice], "usage": None}


def test_tokens_come_from_usage_and_empty_chunks_are_no_deliveries() -> None:
    outcome = record(
        choices(delta={"role": "assistant", "content": ""}),
        choices(delta={"reasoning_content": "hm"}),
        choices(delta={"content": "hello there"}),
        choices(delta={}, finish_reason="stop"),
        {"choices": [], "usage": USAGE},
    )
    assert outcome == Answer(1.0, (3.0, 4.0), 7, 4, 9)


def test_an_answer_without_text_counts_as_delivered_with_its_last_choice() -> None:
    outcome = record(choices(text="", finish_reason="length"), {"choices": [], "usage": USAGE})
    assert outcome == Answer(1.0, (2.0,), 7, 4, 9)


@pytest.mark.parametrize(
    ("messages", "done", "kind"),
    [
        ([choices(text="a"), {"error": {"message": "lost", "code": "x"}}], True, "error in"),
        ([choices(text="a"), {"choices": [], "usage": USAGE}], False, "stream cut off"),
        ([choices(text="a")], True, "no usage"),
        ([{"choices": [], "usage": USAGE}], True, "empty answer"),
    ],
)
def test_a_broken_stream_is_a_failure_of_its_kind(
    messages: list[object], done: bool, kind: str
) -> None:
    outcome = record(*messages, done=done)
    assert isinstance(outcome, Failure) and outcome.kind.startswith(kind)


class FakeServer:
    """Answers with `words` chunks of two tokens each; notes what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.open = self.most_open = 0
        self.refuse: Callable[[int], Response | None] = lambda index: None

    def app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=post),
                Route("/v1/chat/completions", self._complete, methods=post),
            ]
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake"}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        refusal = self.refuse(len(self.bodies) - 1)
        return refusal or StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for _ in range(body["max_tokens"] // 2):
            await asyncio.sleep(0.001)
            choice = {"text": "ab"} if "prompt" in body else {"delta": {"content": "ab"}}
            yield b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        yield b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
        self.open -= 1


@contextmanager
def listening(fake: FakeServer) -> Iterator[str]:
    """`fake` behind a real socket, in a thread of its own; the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


def bench(url: str, *arguments: str) -> int:
    """The exit code of `wavefill bench serve`."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--base-url", url, *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


SMALL = ("--input-len", "7", "--output-len", "6", "--num-prompts", "12", "--warmup", "2")


def test_closed_loop_keeps_the_agreed_callers_and_counts_tokens_not_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, file = FakeServer(), tmp_path / "run.json"
    with listening(fake) as url:
        options = ("--concurrency", "3", "--json", str(file), "--goodput", "e2e:60000")
        assert bench(url, *SMALL, *options, "--api-key", "secret-key", "--ignore-eos") == 0
    figures = json.loads(file.read_text())
    assert len(fake.bodies) == 14, "two of them warm up"
    assert fake.most_open == 3
    assert set(fake.keys) == {"Bearer secret-key"}
    assert {body["model"] for body in fake.bodies} == {"fake"}
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(set(prompts)) == 14 and {len(prompt) for prompt in prompts} == {7}
    assert all(body["ignore_eos"] is True for body in fake.bodies)
    assert (figures["completed"], figures["failed"]) == (12, 0)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (84, 72)
    assert figures["good_requests_per_s"] == pytest.approx(figures["requests_per_s"])
    assert figures["arguments"]["model"] == "fake"
    assert "secret-key" not in file.read_text()
    out = capsys.readouterr().out
    assert "closed loop, 3 callers; 7 tokens in, 6 tokens out" in out
    assert "12 answered, 0 failed" in out and "time to first token" in out


@pytest.mark.parametrize("loop", [("--concurrency", "5"), ("--rate", "500")])
def test_several_processes_send_each_request_once(
    tmp_path: Path, loop: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, file = FakeServer(), tmp_path / "run.json"
    with listening(fake) as url:
        options = ("--processes", "3", "--json", str(file), "--warmup", "0")
        assert bench(url, *SMALL, *loop, *options) == 0
    figures = json.loads(file.read_text())
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    expected = [tuple(workload(output_len=6).prompt(random.Random(f"0/measured/{index}")))
                for index in range(12)]  # fmt: skip
    assert sorted(prompts) == sorted(expected)
    assert fake.most_open <= 5 or loop[0] == "--rate"
    assert (figures["completed"], figures["output_tokens"]) == (12, 72)
    assert figures["ttft_ms"]["p50"] > 0
    assert "12 answered, 0 failed" in capsys.readouterr().out


def test_a_run_is_cut_into_no_more_parts_than_it_has_callers() -> None:
    whole = Share(
        base_url="", api_key=None, timeout_s=1.0, workload=workload(), first=0, step=1,
        count=100, concurrency=7, rate=None,
    )  # fmt: skip
    for processes, callers in ((1, [7]), (3, [3, 2, 2]), (50, [1] * 7)):
        parts = shares(whole, processes)
        assert [part.concurrency for part in parts] == callers
        indices = [i for part in parts for i in range(part.first, part.count, part.step)]
        assert sorted(indices) == list(range(100))


def test_open_loop_sends_chat_requests_without_waiting_for_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeServer()
    with listening(fake) as url:
        options = ("--rate", "2000", "--endpoint", "chat", "--model", "chosen")
        assert bench(url, *SMALL, *options, "--warmup", "0") == 0
    assert fake.most_open > 1
    assert {body["model"] for body in fake.bodies} == {"chosen"}
    assert all(body["messages"][0]["role"] == "user" for body in fake.bodies)
    assert "open loop, 2000 requests / s" in capsys.readouterr().out


def test_refused_requests_are_counted_by_kind_and_end_with_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeServer()
    full = {"error": {"message": "the queue is full"}}
    fake.refuse = lambda index: JSONResponse(full, 429) if index % 3 == 2 else None
    with listening(fake) as url:
        assert bench(url, *SMALL, "--warmup", "0", "--concurrency", "1") == 1
    out = capsys.readouterr().out
    assert "8 answered, 4 failed" in out
    assert "4 x HTTP 429, for example:" in out and "the queue is full" in out


def test_a_failed_warm_up_ends_the_run_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeServer()
    fake.refuse = lambda index: JSONResponse({"error": {"message": "no such key"}}, 401)
    with listening(fake) as url:
        assert bench(url, *SMALL) == 1
    assert len(fake.bodies) == 2
    assert "warm-up: HTTP 401" in capsys.readouterr().err


def test_an_absent_server_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert bench(f"http://127.0.0.1:{port}/v1") == 1
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error and "give --base-url" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--endpoint", "chat", "--prompts", "ids"], "use --prompts words"),
        (["--concurrency", "0"], "from 1 on"),
        (["--rate", "-1"], "above 0"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--goodput", "speed:9"], "write ttft:MS"),
        (["--base-url", "127.0.0.1:8000"], "give one like http://"),
    ],
)
def test_a_wrong_option_is_refused_with_the_remedy(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("http://127.0.0.1:9/v1", *arguments) == 2
    assert told in capsys.readouterr().err


def test_the_module_in_benchmarks_is_the_same_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_serve", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0 and "--goodput" in ran.stdout
