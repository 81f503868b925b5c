"""The soak notices answers that are cut, doubled or short, and processes that grow or end."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks.server import bench_soak, soak_answers
from benchmarks.server.bench_soak import Kill, Record, Sample
from benchmarks.server.soak_answers import Outcome, outcome
from benchmarks.server.soak_callers import VALID, Seen

WANTED = {"max_tokens": 2, "n": 2, "stream": True, "return_token_ids": True}
COUNTED = {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
ERROR = {"error": {"message": "the engine process ended", "code": "engine_error"}}


def answer(content: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content)


def chunked(*pieces: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def part(index: int, *ids: int, finish: str | None = None) -> bytes:
    choice = {"index": index, "token_ids": list(ids), "finish_reason": finish}
    return event({"choices": [choice]})


DONE = event(b"[DONE]")
ENDS = (part(0, finish="length"), part(1, finish="length"))
COMPLETE = (part(0, 5), part(1, 6, 7), b": keep-alive\n\n", part(0, 8), *ENDS, DONE)


def streamed(*events: bytes, body: dict[str, Any] = WANTED) -> Outcome:
    return outcome(chunked(*events), soak_answers.stream(body))


def test_stream_with_every_token_and_one_end_is_complete():
    assert streamed(*COMPLETE) == Outcome("complete", "", 4)


@pytest.mark.parametrize(
    "events",
    [
        (*COMPLETE, DONE),
        (*COMPLETE[:-1],),
        (*COMPLETE[:-1], ENDS[0], DONE),
        (*COMPLETE[:-2], DONE),
        (*COMPLETE[:-1], part(0, 9), DONE),
        (part(0, 5, 8), part(1, 6), *ENDS, DONE),
        (part(0, 5, 8), part(1, 6, 7, 7), *ENDS, DONE),
        (*COMPLETE[:-1], event(ERROR), event(ERROR), DONE),
        (*COMPLETE[:2], event(ERROR), part(0, 8), DONE),
        (event(ERROR), DONE),
        (*COMPLETE[:2], b"data: {\n\n", DONE),
        (*COMPLETE, b"data: x"),
    ],
    ids=[
        "two ends of the stream",
        "no end of the stream",
        "two ends of a choice",
        "no end of a choice",
        "a token behind the end",
        "a token lost",
        "a token doubled",
        "two errors",
        "a token behind an error",
        "an error before the first token",
        "half an event",
        "half an event behind the end",
    ],
)
def test_stream_that_is_wrong_is_found(events: tuple[bytes, ...]):
    assert streamed(*events).end == "wrong"


def test_stream_of_the_wrong_number_of_tokens_is_found_by_its_usage():
    def with_usage(tokens: int) -> Outcome:
        usage = event({"choices": [], "usage": {"completion_tokens": tokens}})
        return streamed(part(0, finish="length"), usage, DONE, body=COUNTED)

    assert with_usage(2).end == "complete" and with_usage(1).end == "wrong"


def test_stream_that_ends_with_an_error_once_is_an_error():
    assert streamed(*COMPLETE[:2], event(ERROR), DONE).end == "error"


def test_every_answer_that_is_cut_is_broken():
    judge = soak_answers.stream(WANTED)
    for raw in (chunked(*COMPLETE), chunked(b"".join(COMPLETE))):
        assert {outcome(raw[:size], judge).end for size in range(len(raw))} == {"broken"}
    body = {"max_tokens": 1}
    choices = [{"finish_reason": "length"}]
    raw = answer(json.dumps({"choices": choices, "usage": {"completion_tokens": 1}}).encode())
    assert outcome(raw, soak_answers.whole(body)).end == "complete"
    cut = {outcome(raw[:size], soak_answers.whole(body)).end for size in range(len(raw))}
    assert cut == {"broken"}


def test_second_answer_on_the_connection_is_found():
    raw = chunked(*COMPLETE)
    assert outcome(raw + raw, soak_answers.stream(WANTED)).end == "wrong"
    refused = answer(json.dumps(ERROR).encode(), 400)
    assert outcome(refused, soak_answers.refusal(400)).end == "refused"
    assert outcome(refused + refused, soak_answers.refusal(400)).end == "wrong"


def test_refusal_needs_its_status_and_a_message():
    assert outcome(answer(b"{}", 400), soak_answers.refusal(400)).end == "wrong"
    assert outcome(answer(b'"x"', 200), soak_answers.refusal(400)).end == "wrong"
    assert outcome(answer(json.dumps(ERROR).encode(), 429), soak_answers.refusal(400)).end == "busy"
    assert outcome(answer(b"Bad Gateway", 503), soak_answers.refusal(400)).end == "wrong"


def test_json_that_does_not_follow_its_schema_is_found():
    judge = soak_answers.whole(VALID["constrained"][1](random.Random(0)))

    def said(content: str) -> str:
        fields = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
        fields["usage"] = {"completion_tokens": 9}
        return outcome(answer(json.dumps(fields).encode()), judge).end

    assert said('{"city": "Rome"}') == "complete"
    assert said('{"city": "Bonn"}') == said('{"city": "Rom') == said("{}") == "wrong"


@pytest.mark.parametrize(
    ("end", "kill", "began", "ended", "excused"),
    [
        ("error", Kill("engine", 5.0), 4.0, 6.0, True),
        ("error", Kill("engine", 5.0), 5.1, 6.0, False),
        ("error", Kill("engine", 5.0), 4.0, 80.0, False),
        ("error", Kill("API", 5.0, {7}), 4.0, 6.0, False),
        ("broken", Kill("API", 5.0, {7}), 4.0, 6.0, True),
        ("broken", Kill("API", 5.0, {8}), 4.0, 6.0, False),
        ("broken", Kill("engine", 5.0), 4.0, 6.0, False),
        ("wrong", Kill("API", 5.0, {7}), 4.0, 6.0, False),
    ],
)
def test_only_the_kill_of_its_process_excuses_an_answer(
    end: str, kill: Kill, began: float, ended: float, excused: bool
):
    record = Record(kills=[kill])
    record.add(Seen("streamed", Outcome(end), port=7), began, ended)
    assert (record.problems == []) == excused


def samples(mib: list[float], pids: list[int]) -> list[Sample]:
    """One every fifty seconds; all four kinds of process look alike."""
    roles = ("launcher", "API", "engine", "other")
    return [
        Sample(50.0 * at, dict.fromkeys(roles, int(size * 2**20)), {r: {pid} for r in roles}, 0.5)
        for at, (size, pid) in enumerate(zip(mib, pids, strict=True))
    ]


def found(mib: list[float], pids: list[int]) -> set[str]:
    problems = bench_soak.problems_of_processes(samples(mib, pids), 300.0)
    return {
        problem.split(": ")[0].split(" engine ")[-1] for problem in problems if "engine" in problem
    }


def test_growth_and_ends_of_processes_count_in_the_second_half_only():
    assert found([10.0] * 6 + [100.0] * 6, [1] * 6 + [2] * 6) == set()
    assert found([100.0] * 6 + [100.0 + 2 * at for at in range(6)], [1] * 12) == set()
    (grew,) = found([100.0] * 6 + [100.0 + 3 * at for at in range(6)], [1] * 12)
    assert grew == "grew from 101.5 to 113.5 MiB"
    assert found([100.0] * 12, [1] * 9 + [2] * 3) == {"a process ended that was not killed"}
    assert bench_soak.problems_of_processes([], 300.0) == [
        f"there are too few samples of {role}" for role in ("launcher", "API", "engine", "other")
    ]


def test_kinds_of_requests_and_kills_that_did_not_happen_are_found():
    nothing = Record()
    assert len(bench_soak.problems_of_ends(nothing)) == len(VALID) + 1
    assert len(bench_soak.problems_of_kills(nothing)) == 2
    slow = Record(kills=[Kill("engine", 1.0, recovery=11.0), Kill("API", 1.0, recovery=9.0)])
    assert bench_soak.problems_of_kills(slow) == ["recovery of the engine took 11.0 s"]
