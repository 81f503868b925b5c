"""Text completions through the real client."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import GREETING, FakeServer


def create(fake: FakeServer, **options: Any) -> Any:
    return fake.client().completions.create(**({"model": "fake"} | options))


def test_an_answer_has_every_field_of_openais(fake: FakeServer):
    answer = create(fake, prompt="x", max_tokens=50)
    [choice] = answer.choices
    assert (answer.object, answer.model) == ("text_completion", "fake")
    assert answer.id.startswith("cmpl-")
    assert (choice.index, choice.text, choice.finish_reason) == (0, GREETING, "stop")
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == 1


def test_the_default_length_is_16_tokens(fake: FakeServer):
    answer = create(fake, prompt="x")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_spells_the_answer(fake: FakeServer):
    options = {"include_usage": True}
    *chunks, last = create(fake, prompt="x", max_tokens=50, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == GREETING
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [["ab"]]),
        (["a", "b"], [["a"], ["b"]]),
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
def test_every_form_of_prompt_is_answered_in_order(
    fake: FakeServer, stream: bool, prompt: Any, tokens: Any
):
    prompts = [fake.tokenizer.encode(t[0]) if isinstance(t[0], str) else t for t in tokens]
    fake.engine.reply = lambda request: [*request.tokens, 20 + request.id]
    answer = create(fake, prompt=prompt, n=2, stream=stream)
    texts = [""] * len(prompts) * 2
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    requests = fake.engine.requests
    assert [request.tokens for request in requests] == [t for t in prompts for _ in range(2)]
    expected = [fake.tokenizer.decode([*r.tokens, 20 + r.id]) for r in requests]
    assert texts == expected
    if not stream:
        assert answer.usage.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(fake: FakeServer, stream: bool):
    answer = create(fake, prompt=["Say: ", "Hi "], echo=True, max_tokens=2, stream=stream)
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["Say: Hello,", "Hi Hello,"]


def test_echo_of_token_ids_spells_them(fake: FakeServer):
    prompt = fake.tokenizer.encode("<|user|>fox")
    answer = create(fake, prompt=prompt, echo=True, max_tokens=1)
    assert answer.choices[0].text == "<|user|>foxHello"


def test_echo_alone_generates_nothing(fake: FakeServer):
    answer = create(fake, prompt="The fox", echo=True, max_tokens=0, logprobs=1)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("The fox", "length")
    assert answer.usage.completion_tokens == 0
    assert "".join(choice.logprobs.tokens) == "The fox"
    assert choice.logprobs.token_logprobs[0] is None
    assert set(choice.logprobs.token_logprobs[1:]) == {-0.25}


def test_echo_alone_streams_the_prompt(fake: FakeServer):
    chunks = list(create(fake, prompt="The fox", echo=True, max_tokens=0, stream=True))
    ends = [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks]
    assert ends == [("The fox", None), ("", "length")]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_carry_tokens_and_their_offsets(fake: FakeServer, stream: bool):
    fake.say("Hello, w\u00f6rld!")
    answer = create(fake, prompt="x", max_tokens=50, logprobs=2, stream=stream)
    columns: dict[str, list[Any]] = {}
    for part in answer if stream else [answer]:
        logprobs = part.choices[0].logprobs
        for key, values in (logprobs.model_dump() if logprobs else {}).items():
            columns.setdefault(key, []).extend(values)
    tokens = [*fake.tokenizer.encode("Hello, w\u00f6rld!"), 0]
    assert len(columns["tokens"]) == len(tokens)
    assert (columns["tokens"][0], columns["tokens"][-1]) == ("Hello", "<|end|>")
    assert columns["text_offset"][:4] == [0, 5, 6, 7]
    assert columns["text_offset"][-2:] == [len("Hello, w\u00f6rld"), len("Hello, w\u00f6rld!")]
    assert set(columns["token_logprobs"]) == {-0.25}
    assert columns["top_logprobs"][0]["Hello"] == -0.25 and len(columns["top_logprobs"][0]) == 2


def test_parts_of_a_character_are_called_by_their_bytes(fake: FakeServer):
    fake.say("\u20ac\\", end=False)
    logprobs = create(fake, prompt="x", max_tokens=3, logprobs=4).choices[0].logprobs
    tokens = fake.tokenizer.encode("\u20ac\\")
    assert [fake.tokenizer.token_bytes(token) for token in tokens[:2]] == [b"\xe2", b"\x82"]
    assert logprobs.tokens[:2] == ["bytes:\\xe2", "bytes:\\x82"]
    # Each alternative has a name of its own.
    assert [len(top) for top in logprobs.top_logprobs[:2]] == [4, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "text", "words", "offsets"),
    [
        ({}, "Hello, wo", ["Hello", ",", " ", "w", "o", "<|end|>"], [0, 5, 6, 7, 8, 9]),
        ({"stop": " w"}, "Hello,", ["Hello", ",", " ", "w"], [0, 5, 6, 7]),
        ({"max_tokens": 2}, "Hello,", ["Hello", ","], [0, 5]),
        ({"echo": True}, "xHello, wo", ["x", "Hello", ",", " ", "w", "o", "<|end|>"], None),
    ],
)
def test_there_is_a_logprob_for_each_token_id_that_was_generated(
    fake: FakeServer,
    stream: bool,
    end: dict[str, Any],
    text: str,
    words: list[str],
    offsets: list[int] | None,
):
    fake.say("Hello, wo")
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked = {"max_tokens": 50, "logprobs": 0, "extra_body": {"return_token_ids": True}} | end
    answer = create(fake, prompt="x", **asked, **options)
    *parts, last = answer if stream else [answer, answer]
    choices = [part.choices[0] for part in parts]
    found = [choice.logprobs for choice in choices if choice.logprobs]
    ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
    assert "".join(choice.text for choice in choices) == text
    assert [word for each in found for word in each.tokens] == words
    shown = [place for each in found for place in each.text_offset]
    assert shown == (offsets or [0, 1, 6, 7, 8, 9, 10])
    assert len(ids) == last.usage.completion_tokens == len(words) - ("echo" in end)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_with_echo_cover_the_prompt(fake: FakeServer, stream: bool):
    answer = create(fake, prompt="The fox", echo=True, logprobs=0, max_tokens=1, stream=stream)
    parts = list(answer) if stream else [answer]
    logprobs = parts[0].choices[0].logprobs
    assert "".join(logprobs.tokens) == "The foxHello"
    assert logprobs.text_offset[-1] == 7
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[-1] == {"Hello": -0.25}


def test_prompt_logprobs_belong_to_each_choice(fake: FakeServer):
    body = {"model": "fake", "prompt": ["ab", "b"], "prompt_logprobs": 2, "max_tokens": 1}
    answer = httpx.post(f"{fake.url}/v1/completions", json=body).json()
    scores = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [len(entry) for entry in scores] == [2, 1]
    assert scores[1] == [None]
    assert [score["rank"] for score in scores[0][1].values()] == [1, 2]
