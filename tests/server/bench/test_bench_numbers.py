"""`wavefill bench serve`: its arithmetic and its reading of streams."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from server.bench.client import Lines, Recorder
from server.bench.metrics import Failure, Objectives, RequestResult, percentile, spread, summarize
from server.bench.workload import poisson_arrivals
from server.cli.bench.options import read_objectives
from server.cli.main import UsageError
from tests.support.bench.bench_workload import workload


def answer(start: float, *deliveries: float, prompt: int = 10, output: int = 3) -> RequestResult:
    return RequestResult(start, deliveries, prompt, 0, output)


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
    assert summary.good_requests_per_s is None, "no limits were set"


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
    found = [data for chunk in cut for data in lines.feed(chunk)]
    assert found == ['{"a": "ü"}'.encode(), b'{"b": 1}', b"[DONE]"]


USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


def record(*messages: object, done: bool = True) -> RequestResult | Failure:
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
    assert outcome == RequestResult(1.0, (3.0, 4.0), 7, 4, 9)


def test_an_answer_without_text_counts_as_delivered_with_its_last_choice() -> None:
    outcome = record(choices(text="", finish_reason="length"), {"choices": [], "usage": USAGE})
    assert outcome == RequestResult(1.0, (2.0,), 7, 4, 9)


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
