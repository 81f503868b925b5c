"""One request's life: stop strings, ends, admission, abort; nothing runs on after an answer."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.messages import Progress
from server.generation.answer_text import StopStrings
from server.generation.choice import Chunk
from server.generation.generated_answer import GeneratedAnswer
from server.tool_calls.parser.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from tests.support.examples import examples
from tests.support.server.fake_engine import CONTEXT, GREETING, FakeServer, ready

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}

CONTINUED = [{"role": "assistant", "content": "Well"}]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def post(fake: FakeServer, **change: object) -> dict[str, Any]:
    answer = httpx.post(fake.url + CHAT, json=HELLO | change)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(fake: FakeServer, **change: object) -> tuple[str, str]:
    choice = post(fake, **change)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def streamed(fake: FakeServer, **change: object) -> tuple[str, str]:
    stream = fake.client().chat.completions.create(**HELLO, stream=True, **change)  # type: ignore
    choices = [chunk.choices[0] for chunk in stream]
    return "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason


stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@examples(500)
@given(text=st.text("abc", max_size=20), stops=stops, cuts=st.lists(st.integers(0, 5)))
def test_a_stop_string_ends_the_text_alike_for_every_split(
    text: str, stops: list[str], cuts: list[int]
):
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    whole = text if not ends else text[: min(ends)]
    stop = max((s for s in stops if whole.endswith(s) and ends), key=len, default="")
    expected = whole.removesuffix(stop)

    machine = StopStrings(stops)
    seen, rest = "", text
    while rest and machine.hit is None:
        size = cuts.pop() if cuts else 1
        seen += machine.feed(rest[:size])
        rest = rest[size:]
        assert expected.startswith(seen), "text was shown that belongs to the stop string"
    if machine.hit is None:
        seen += machine.flush()
    assert (seen, machine.hit) == (expected, stop or None)


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    machine = StopStrings(["STOP"])
    assert [machine.feed(chunk_text) for chunk_text in ("a S", "TO", "x", "S")] == [
        "a ",
        "",
        "STOx",
        "",
    ]
    assert machine.flush() == "S"


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("ask", [said, streamed])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("w\u00f6", "Hello, "),
        (", w", "Hello"),
        (["zzz", "rld"], "Hello, w\u00f6"),
        ("Hello", ""),
        ("Bye.", "Hello, w\u00f6rld! \N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-5} "),
        ("Bye. And", GREETING),
        ("\N{WAVING HAND SIGN}", "Hello, w\u00f6rld! "),
    ],
)
def test_the_answer_ends_before_the_stop_string(
    fake: FakeServer, step: int, ask: Any, stop: object, expected: str
):
    fake.engine.step = step
    assert ask(fake, stop=stop) == (expected, "stop")
    wait_until(lambda: fake.engine.pending == 0)


def test_the_stop_string_is_kept_when_asked_for(fake: FakeServer):
    assert said(fake, stop="w\u00f6", include_stop_str_in_output=True) == ("Hello, w\u00f6", "stop")


def test_a_stop_string_before_min_tokens_does_not_count(fake: FakeServer):
    fake.say("stop, stop, stop.")
    assert said(fake, stop="stop", min_tokens=3)[0].startswith("stop, ")


def test_a_stop_string_ends_the_engines_work_at_once(fake: FakeServer):
    fake.engine.delay = 0.01
    fake.say("Hello STOP" + " more" * 100)
    answer = post(fake, stop="STOP", max_tokens=200)
    assert fake.engine.aborted == [1]
    assert answer["usage"]["completion_tokens"] < 20


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(fake: FakeServer):
    [comma] = fake.tokenizer.encode(",")
    assert said(fake, stop_token_ids=[comma]) == ("Hello", "stop")
    assert said(fake, stop_token_ids=[comma], include_stop_str_in_output=True)[0] == "Hello,"


def test_the_end_token_is_ignored_when_asked_for(fake: FakeServer):
    fake.engine.reply = lambda request: [0, 0, 0]
    assert said(fake, ignore_eos=True, max_tokens=3) == ("", "length")
    assert fake.engine.requests[-1].params.stop_ids == ()
    assert said(fake, ignore_eos=True, max_tokens=2, skip_special_tokens=False)[0] == "<|end|>" * 2


def test_the_length_limit_ends_an_answer_with_length(fake: FakeServer):
    assert said(fake, max_tokens=2) == ("Hello,", "length")
    assert said(fake, max_completion_tokens=1) == ("Hello", "length")


def test_a_chat_may_use_all_of_the_context_by_default(fake: FakeServer):
    answer = post(fake)
    submitted_max = fake.engine.requests[-1].params.max_tokens
    assert submitted_max == CONTEXT - answer["usage"]["prompt_tokens"]


def test_the_prompts_cached_tokens_are_counted(fake: FakeServer):
    fake.engine.cached = 3
    assert post(fake, n=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_each_completion_of_one_seed_has_a_seed_of_its_own(fake: FakeServer):
    post(fake, n=3, seed=2**63 - 2)
    seeds = [request.params.seed for request in fake.engine.requests]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_a_top_p_of_0_leaves_the_likeliest_token(fake: FakeServer):
    post(fake, top_p=0, top_k=50)
    params = fake.engine.requests[-1].params
    assert (params.top_p, params.top_k) == (1, 1)


def test_the_first_of_many_stop_strings_ends_the_answer(fake: FakeServer):
    stops = [f"{place:0128}" for place in range(31)] + ["Bye"]
    choice = post(fake, stop=stops)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Bye")
    assert choice["message"]["content"] == GREETING.partition("Bye")[0]


def test_parameters_reach_the_engine(fake: FakeServer):
    post(
        fake,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=7,
        min_tokens=2,
        max_tokens=9,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=2,
        priority=-3,
        cache_salt="mine",
        stop_token_ids=[9, 0],
    )
    request = fake.engine.requests[-1]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert (params.repetition_penalty, params.seed, params.min_tokens) == (1.5, 7, 2)
    assert (params.max_tokens, params.logit_bias, params.logprobs) == (9, {5: -100}, 2)
    assert (request.priority, request.salt, params.stop_ids) == (-3, b"mine", (0, 9))


def test_a_nearly_frozen_temperature_is_greedy(fake: FakeServer):
    post(fake, temperature=1e-30, top_k=-1)
    params = fake.engine.requests[-1].params
    assert (params.temperature, params.top_k) == (0.0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("held", [False, True])
def test_a_client_that_goes_frees_every_sequence(
    fake: FakeServer, stream: bool, n: int, held: bool
):
    fake.engine.delay = 0.02
    fake.engine.held = held
    with httpx.Client(timeout=0.15 if held or not stream else 5) as client:
        try:
            with client.stream(
                "POST", fake.url + CHAT, json=HELLO | {"stream": stream, "n": n}
            ) as answer:
                next(answer.iter_raw())
        except httpx.ReadTimeout:
            assert held or not stream
    wait_until(lambda: fake.engine.pending == 0)
    assert sorted(fake.engine.aborted) == list(range(1, n + 1))


def counted(fake: FakeServer, name: str, label: str) -> float:
    """The value of the series of a metric that has this label."""
    lines = httpx.get(f"{fake.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if name in line and label in line)


def test_a_failing_completion_takes_its_siblings_with_it(fake: FakeServer):
    before = counted(fake, "wavefill_aborted_total", 'by="error"')
    fake.engine.delay = 0.01
    fake.engine.fail_after = 2
    fake.engine.failing = lambda request: request.id == 2
    answer = httpx.post(fake.url + CHAT, json=HELLO | {"n": 3})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    wait_until(lambda: fake.engine.pending == 0)
    assert counted(fake, "wavefill_aborted_total", 'by="error"') == before + 2
    assert fake.engine.aborted == [1, 3]


def test_every_end_is_counted_once_under_its_reason(fake: FakeServer):
    def ends() -> list[float]:
        reasons = ("stop", "length", "error", "abort")
        name = "wavefill_requests_total"
        aborts = counted(fake, "wavefill_aborted_total", 'by="disconnect"')
        return [counted(fake, name, f'finished_reason="{r}"') for r in reasons] + [aborts]

    before = ends()
    post(fake, n=2)
    post(fake, stop="w")
    post(fake, max_tokens=2)
    fake.engine.fail_after = 0
    httpx.post(fake.url + CHAT, json=HELLO)
    fake.engine.fail_after = None
    fake.engine.held = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(fake.url + CHAT, json=HELLO, timeout=0.1)
    wait_until(lambda: fake.engine.pending == 0)
    after = ends()
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 1, 1, 1, 1]


@pytest.mark.parametrize("ask", [said, streamed])
@pytest.mark.parametrize("options", [{}, {"stop": "zzz"}, {"logprobs": True}])
def test_an_answer_cut_inside_a_character_loses_nothing(
    fake: FakeServer, ask: Any, options: dict[str, Any]
):
    tokens = fake.tokenizer.encode("Hi \N{WAVING HAND SIGN}")
    fake.engine.reply = lambda request: tokens
    assert ask(fake, max_tokens=len(tokens) - 1, **options) == ("Hi \ufffd", "length")


def test_an_answer_that_ends_inside_a_stop_string_shows_what_was_held(fake: FakeServer):
    fake.say("Hello ST")
    assert said(fake, stop="STOP") == streamed(fake, stop="STOP") == ("Hello ST", "stop")


def refused(fake: FakeServer, status: int, code: str, **change: object) -> httpx.Response:
    answer = httpx.post(fake.url + CHAT, json=HELLO | change)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    return answer


def test_a_full_queue_says_when_to_come_back(fake: FakeServer):
    fake.engine.held = True
    with httpx.Client(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.post(fake.url + CHAT, json=HELLO | {"n": 128})
        # the client has gone, so its sequences are freed again
    wait_until(lambda: fake.engine.pending == 0)
    fake.engine.held = False
    fake.engine.delay = 0.01
    waiting = fake.client().chat.completions.create(**HELLO, n=128, stream=True)  # type: ignore
    wait_until(lambda: fake.engine.pending == 128)
    answer = refused(fake, 429, "rate_limit_exceeded", n=73)
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert "200" in answer.json()["error"]["message"]
    post(fake, n=72, max_tokens=1)
    waiting.close()
    wait_until(lambda: fake.engine.pending == 0)


def test_a_loading_model_is_503_and_says_what_is_being_done(fake: FakeServer):
    fake.engine.ready = None
    answer = refused(fake, 503, "loading")
    assert "starting" in answer.json()["error"]["message"]
    fake.engine.progress = Progress("reading weights", 3, 10)
    answer = refused(fake, 503, "loading", stream=True)
    assert "reading weights 30 %" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    fake.engine.ready = ready()
    post(fake)


def test_an_engine_with_snapshots_hears_where_the_answer_begins(fake: FakeServer):
    fake.engine.ready = replace(ready(), num_snapshots=4)
    post(fake)
    post(fake, messages=[*HELLO["messages"], *CONTINUED], continue_final_message=True)
    fake.engine.ready = ready()
    post(fake)
    assert [one.generation_prompt_len for one in fake.engine.requests[-3:]] == [1, 0, 0]


def test_a_dead_engine_is_503(fake: FakeServer):
    fake.engine.ready = None
    fake.engine.down = "killed by signal 9"
    answer = refused(fake, 503, "engine_down")
    assert "signal 9" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0


def test_a_wrong_request_is_refused_even_while_loading(fake: FakeServer):
    fake.engine.ready = None
    refused(fake, 400, "invalid_value", temperature=9)
    refused(fake, 404, "model_not_found", model="other")


@pytest.mark.timeout(15)
def test_a_long_answer_is_put_together_once():
    answer, number = GeneratedAnswer(None), 200_000  # type: ignore[arg-type]
    deltas = [ReasoningDelta("think"), ContentDelta("hello"), ToolCallDelta(0, "12345")]
    answer.put(Chunk([ToolCallDelta(0, "", "call_1", "f")], [], None, []))
    for _ in range(number):
        answer.put(Chunk(deltas, [], None, []))
    assert answer.reasoning == "think" * number
    assert answer.content == "hello" * number
    assert answer.tool_calls[0].arguments == "12345" * number


PADDING = "\t"  # between two fields of a body, where nothing reads it
NUM_PADDING = 300_000


def send_padded(caller: socket.socket) -> None:
    """Ask for an answer in a large body, of which this side keeps nothing."""
    fields = json.dumps(HELLO).replace(", ", "," + PADDING * NUM_PADDING, 1).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    caller.sendall(f"{head}Content-Length: {len(fields)}\r\n\r\n".encode() + fields)


def padded_bytes() -> list[int]:
    """The lengths of all bytes in this process that hold much of the padding."""
    gc.unfreeze()  # what was collected with the tests is looked through, too
    gc.collect()
    held = gc.get_referents(*gc.get_objects())
    # The collector does not know containers of strings alone, so they are looked into here.
    plain = [each for each in held if type(each) in (dict, tuple) and not gc.is_tracked(each)]
    held += gc.get_referents(*plain)
    found = [each for each in held if type(each) in (bytes, bytearray) and len(each) > 1000]
    return [len(each) for each in found if each.count(PADDING.encode()) > NUM_PADDING // 100]


def test_a_body_is_not_kept_as_bytes_while_its_answer_is_made(fake: FakeServer):
    fake.engine.held = True
    host, _, port = fake.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as caller:
        send_padded(caller)
        wait_until(lambda: fake.engine.num_open == 1)
        kept = padded_bytes()
        fake.engine.held = False
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert kept == []
