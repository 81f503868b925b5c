"""What a choice makes of the engine's outputs, and what it reports to metrics and the engine."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.ipc.client import Mailbox
from runtime.messages import EngineRequest, RequestOutput, SamplingParams, TokenLogprob
from server.errors import EngineFailed, RequestError
from server.generation import choice as choice_module
from server.generation.answer_text import AnswerText
from server.generation.choice import Choice
from server.generation.detokenizer import ByteDetokenizer
from tests.support.server.fake_engine import FakeEngine

WORDS = [b"a", b"b", b"c", b"d"]  # by token id


class NotedMetrics:
    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.ends: list[tuple[Any, ...]] = []
        self.aborts: list[str] = []
        self.first: list[float] = []
        self.first_token = self.first.append
        self.inter_token = self.gaps.append
        self.aborted = self.aborts.append

    def request_finished(self, *counts: object, **times: float) -> None:
        self.ends.append((*counts, times))


class NotedEngine(FakeEngine):
    def abort(self, id: int) -> None:
        self.aborted.append(id)


class Followed:
    """A choice with a clock that the test sets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *stops: str, scored: bool = False, grammar: str = ""
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(choice_module.time, "monotonic", lambda: self.now)
        self.metrics: Any = NotedMetrics()
        self.engine = NotedEngine(reply=lambda request: [])
        params = SamplingParams(9, logprobs=0 if scored else None, grammar=grammar)
        mailbox = Mailbox(EngineRequest(7, 0, [1, 2, 3], params, arrived=1.0))
        text = AnswerText(
            ByteDetokenizer(WORDS), list(stops), include_stop=False, min_tokens=0, scored=scored
        )
        self.choice = Choice(0, mailbox, text, None, self.engine, self.metrics)

    def feed(self, now: float, tokens: list[int], **fields: Any) -> tuple[str, Any, list[int]]:
        self.now = now
        chunk = self.choice.feed(RequestOutput(7, tokens, **fields))
        return chunk.text, chunk.finish, chunk.tokens


def test_the_metrics_are_told_of_each_gap_and_of_the_end(monkeypatch: pytest.MonkeyPatch):
    followed = Followed(monkeypatch)
    assert followed.feed(3.0, [0], started=2.0, cached=2) == ("a", None, [0])
    assert followed.feed(4.0, [1, 2]) == ("bc", None, [1, 2])
    followed.feed(5.0, [])
    last = followed.feed(6.5, [3], finish="length", preemptions=1, mean_batch=2.5)
    assert last == ("d", "length", [3])
    assert followed.metrics.first == [2.0]
    assert followed.metrics.gaps == [1.0, 2.5]
    times = {"arrived": 1.0, "started": 2.0, "first_token": 3.0, "ended": 6.5}
    assert followed.metrics.ends == [("length", 3, 4, times)]
    assert followed.choice.stats.timings() == {
        "queue_seconds": 1.0,
        "prefill_seconds": 1.0,
        "decode_seconds": 3.5,
        "total_seconds": 5.5,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "preemptions": 1,
        "mean_batch_size": 2.5,
    }


def test_tokens_behind_a_stop_string_are_no_part_of_the_answer(monkeypatch: pytest.MonkeyPatch):
    followed = Followed(monkeypatch, "bc")
    assert followed.feed(2.0, [0, 1]) == ("a", None, [0, 1])
    assert followed.feed(3.0, [2, 3, 3]) == ("", "stop", [2])
    assert (followed.choice.stats.generated, followed.choice.stop_hit) == (3, "bc")
    assert followed.engine.aborted == [7], "the engine does not see stop strings"


def test_an_end_of_the_engines_own_is_not_aborted(monkeypatch: pytest.MonkeyPatch):
    followed = Followed(monkeypatch, "bc")
    assert followed.feed(2.0, [0, 1, 2, 3], finish="length") == ("a", "stop", [0, 1, 2])
    followed.choice.abort("disconnect")
    assert followed.engine.aborted == followed.metrics.aborts == []
    assert len(followed.metrics.ends) == 1


def test_scores_go_out_with_the_text_that_they_belong_to(monkeypatch: pytest.MonkeyPatch):
    followed = Followed(monkeypatch, "bc", scored=True)
    scores = [TokenLogprob(-float(token), 1, []) for token in range(4)]

    def feed(*tokens: int, **fields: Any) -> list[int]:
        given = [scores[token] for token in tokens]
        output = RequestOutput(7, list(tokens), logprobs=given, **fields)
        return [entry.token for entry in followed.choice.feed(output).scored]

    assert feed(0) == [0]
    assert feed(0, 1) == [0], "the text of the second is held back"
    assert feed(3) == [1, 3]
    assert feed(1) == []
    assert feed(2) == [1, 2], "all that are left come with the end"


@pytest.mark.parametrize("stops", [(), ("bc",)])
def test_a_stop_token_counts_and_has_no_text(
    monkeypatch: pytest.MonkeyPatch, stops: tuple[str, ...]
):
    followed = Followed(monkeypatch, *stops)
    assert followed.feed(2.0, [1, 3], finish="stop", stop_id=3) == ("b", "stop", [1, 3])
    assert (followed.choice.stats.generated, followed.choice.stop_hit) == (2, 3)
    assert followed.engine.aborted == []


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"finish": "error", "error": "it died"}, EngineFailed, "cut off: it died"),
        ({"finish": "abort"}, EngineFailed, "cut off: it was aborted"),
        (
            {"finish": "error", "error": "a bad grammar", "is_request_error": True},
            RequestError,
            "a bad grammar",
        ),
    ],
)
def test_an_error_of_the_engine_ends_a_choice(
    monkeypatch: pytest.MonkeyPatch, fields: Any, kind: type[RequestError], words: str
):
    followed = Followed(monkeypatch, grammar="{}")
    followed.feed(2.0, [0])
    with pytest.raises(kind, match=words) as caught:
        followed.feed(3.0, [], **fields)
    assert caught.value.code == ("engine_error" if kind is EngineFailed else "invalid_grammar")
    followed.choice.abort("error")
    assert followed.choice.finish == fields["finish"]
    assert [end[:3] for end in followed.metrics.ends] == [(fields["finish"], 3, 1)]
    assert followed.engine.aborted == followed.metrics.aborts == []


def test_an_abort_is_counted_once(monkeypatch: pytest.MonkeyPatch):
    followed = Followed(monkeypatch)
    followed.feed(2.0, [0])
    followed.choice.abort("disconnect")
    followed.choice.abort("error")
    assert (followed.engine.aborted, followed.metrics.aborts) == ([7], ["disconnect"])
    assert [end[:3] for end in followed.metrics.ends] == [("abort", 3, 1)]
    assert followed.choice.finish == "abort"
