"""Parameters of text completions beyond OpenAI's common ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from tokenizers import AddedToken, Tokenizer

from runtime.messages import MAX_BANNED_TOKENS, EngineRequest, RequestOutput, TokenLogprob
from server.errors import UnsupportedParameter
from server.prompt.fim import FORMATS, fill_format, prompt_with_gap
from server.prompt.tokenizer import ChatTokenizer
from tests.support.server.fake_engine import CONTEXT, FakeServer, fake_server, write_tokenizer


def ask(fake: FakeServer, route: str = "completions", **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": "x", **fields}
    if route != "completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    answer = httpx.post(f"{fake.url}/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(fake: FakeServer, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "fake", "prompt": "x", "stream": True, **fields}
    lines = httpx.post(f"{fake.url}/v1/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_allowed_ids_and_bad_words_reach_the_sampler(fake: FakeServer, route: str):
    ask(fake, route, allowed_token_ids=[7, 9], bad_words=["fox", " lazy dog"])
    [request] = fake.engine.requests
    assert request.params.allowed_ids == (7, 9)
    spelled = {fake.tokenizer.decode(ids) for ids in request.params.banned}
    assert spelled == {"fox", " fox", "lazy dog", " lazy dog"}


def test_every_prompt_gets_the_same_token_sets(fake: FakeServer):
    ask(fake, prompt=["a", "b"], n=2, bad_words=["fox"])
    assert len({request.params.banned for request in fake.engine.requests}) == 1
    assert len(fake.engine.requests) == 4


def test_a_bad_word_of_spaces_bans_them(fake: FakeServer):
    ask(fake, bad_words=["  "])
    [request] = fake.engine.requests
    assert {fake.tokenizer.decode(ids) for ids in request.params.banned} == {"  ", "   "}


def test_as_many_tokens_as_fit_a_bad_word_are_taken(fake: FakeServer):
    ask(fake, bad_words=["\x01" * (MAX_BANNED_TOKENS - 1)])
    assert max(map(len, fake.engine.requests[0].params.banned)) == MAX_BANNED_TOKENS


@pytest.mark.parametrize("prompt", ["The quick brown fox", [5, 6, 7, 8, 9, 10]])
def test_truncation_keeps_the_last_tokens(fake: FakeServer, prompt: Any):
    whole = fake.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    answer = ask(fake, prompt=prompt, truncate_prompt_tokens=3, max_tokens=1)
    [request] = fake.engine.requests
    assert request.tokens == whole[-3:]
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", ["The quick brown fox", [5, 6, 7, 8, 9, 10]])
def test_truncation_on_the_right_keeps_the_first_tokens(fake: FakeServer, prompt: Any):
    whole = fake.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    options = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    ask(fake, prompt=prompt, max_tokens=1, **options)
    assert fake.engine.requests[-1].tokens == whole[:3]


def test_a_shorter_prompt_is_not_touched(fake: FakeServer):
    ask(fake, prompt=[5, 6], truncate_prompt_tokens=3)
    assert fake.engine.requests[0].tokens == [5, 6]


@pytest.mark.parametrize(("max_tokens", "room"), [(20, CONTEXT - 20), (1, CONTEXT - 1)])
def test_minus_one_keeps_what_leaves_room_for_the_answer(
    fake: FakeServer, max_tokens: int, room: int
):
    text = "Hello, world! " * 50_000  # far more than would be taken without truncation
    whole = fake.tokenizer.encode("Hello, world! " * 200)
    ask(fake, prompt=text, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert fake.engine.requests[0].tokens == whole[-room:]


def test_echo_returns_what_truncation_left(fake: FakeServer):
    tokens = fake.tokenizer.encode("The quick brown fox")
    answer = ask(
        fake, prompt="The quick brown fox", truncate_prompt_tokens=2, echo=True, max_tokens=0
    )
    assert answer["choices"][0]["text"] == fake.tokenizer.decode(tokens[-2:])


def test_token_ids_are_returned_of_prompt_and_answer(fake: FakeServer):
    fake.engine.reply = lambda request: [*request.tokens, 20 + request.id, 0]
    answer = ask(fake, prompt=[[65], [66, 67]], return_token_ids=True)
    found = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answer["choices"]]
    assert found == [([65], [65, 21, 0]), ([66, 67], [66, 67, 22, 0])]
    assert answer["usage"]["completion_tokens"] == 7


def test_token_ids_are_left_out_unless_asked_for(fake: FakeServer):
    [choice] = ask(fake)["choices"]
    assert not {"token_ids", "prompt_token_ids"} & set(choice)


@pytest.mark.parametrize("fields", [{}, {"stop": "world"}, {"logprobs": 1}])
def test_a_stream_returns_the_token_ids_as_they_come(fake: FakeServer, fields: dict[str, Any]):
    fake.say("Hello, w\u00f6rld and world!")
    plain = ask(fake, prompt="Say", max_tokens=50, return_token_ids=True, **fields)["choices"][0]
    chunks = stream(fake, prompt="Say", max_tokens=50, return_token_ids=True, **fields)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    said = [token for choice in choices for token in choice.get("token_ids", [])]
    assert said == plain["token_ids"]
    assert "".join(choice["text"] for choice in choices) == plain["text"]


@pytest.fixture
def likelier(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Requests by id: each answers its own number, every token with its expected logprob."""

    def install(logprobs: dict[int, float]) -> None:
        def outputs(request: EngineRequest) -> Iterator[RequestOutput]:
            score = TokenLogprob(logprobs[request.id], 1, [])
            tokens = fake.tokenizer.encode(f"{request.id}")
            yield RequestOutput(request.id, tokens, "length", logprobs=[score] * len(tokens))

        monkeypatch.setattr(fake.engine, "_outputs", outputs)

    return install


def test_best_of_returns_the_likeliest(fake: FakeServer, likelier: Callable[..., None]):
    likelier({1: -3.0, 2: -0.5, 3: -2.0, 4: -1.0, 5: -9.0, 6: -8.0, 7: -7.0, 8: -6.0})
    answer = ask(fake, prompt=["a", "b"], n=2, best_of=4)
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(0, "2"), (1, "4"), (2, "8"), (3, "7")]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 8  # what was thrown away was computed, too
    assert answer["usage"]["prompt_tokens"] == 2


def test_best_of_may_show_the_logprobs_it_chose_by(fake: FakeServer, likelier: Callable[..., None]):
    likelier({1: -3.0, 2: -0.5})
    [choice] = ask(fake, best_of=2, logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]


def test_best_of_n_itself_changes_nothing(fake: FakeServer):
    answer = ask(fake, n=2, best_of=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert fake.engine.requests[0].params.logprobs is None
    assert stream(fake, best_of=1)[-1]["choices"][0]["finish_reason"] == "length"


def test_the_logprobs_of_chosen_tokens_are_shown(fake: FakeServer):
    ids = [*fake.tokenizer.encode("fox"), 65, 66, 65]
    [choice] = ask(fake, logprob_token_ids=ids, logprobs=0, max_tokens=1)["choices"]
    [request] = fake.engine.requests
    unique = list(dict.fromkeys(ids))
    assert (request.params.logprob_ids, request.params.logprobs) == (tuple(unique), len(unique))
    [tops] = choice["logprobs"]["top_logprobs"]
    for place, token in enumerate(unique):
        assert tops[fake.tokenizer.decode([token])] == -0.25 - place
    assert set(tops) == {*(fake.tokenizer.decode([token]) for token in unique), "Hello"}


def filling(folder: Path, *words: str) -> ChatTokenizer:
    path = write_tokenizer(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words])
    tokenizer.save(str(path))
    return ChatTokenizer.load(folder)


GAPS = [
    "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>",
    "<fim_prefix>def f(<fim_suffix>return x<fim_middle>",
    "<fim-prefix>def f(<fim-suffix>return x<fim-middle>",
    "<\uff5cfim\u2581begin\uff5c>def f("
    "<\uff5cfim\u2581hole\uff5c>return x<\uff5cfim\u2581end\uff5c>",
    "\u2581<PRE>def f(\u2581<SUF>return x\u2581<MID>",
    "[SUFFIX]return x[PREFIX]def f(",
]


@pytest.mark.parametrize("written", GAPS)
def test_a_gap_is_marked_with_the_models_own_tokens(tmp_path: Path, written: str):
    words = [word for word in re.split(r"def f\(|return x", written) if word]
    tokenizer = filling(tmp_path, *words)
    text = prompt_with_gap("def f(", "return x", tokenizer, "m")
    assert text == written
    tokens = tokenizer.encode(text)
    marks = [tokenizer.tokenizer.token_to_id(word) for word in words]
    assert [token for token in tokens if token in marks] == marks


def test_every_way_to_fill_a_gap_is_tried():
    assert len(FORMATS) == len(GAPS)


def test_some_of_the_tokens_are_not_enough(tmp_path: Path):
    tokenizer = filling(tmp_path, "<fim_prefix>", "<fim_suffix>")
    assert fill_format(tokenizer) is None
    with pytest.raises(UnsupportedParameter, match="no tokens for filling a gap"):
        prompt_with_gap("a", "b", tokenizer, "m")


def test_a_suffix_is_filled_by_a_model_that_can(tmp_path: Path):
    with fake_server(tmp_path) as server:
        words = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
        server.tokenizer.tokenizer.add_special_tokens(
            [AddedToken(word, special=True) for word in words]
        )
        ask(server, prompt="The quick", suffix=" fox", max_tokens=1)
        [request] = server.engine.requests
        text = server.tokenizer.decode(request.tokens, skip_special=False)
        assert text == "<|fim_prefix|>The quick<|fim_suffix|> fox<|fim_middle|>"


def test_an_empty_suffix_is_no_suffix(fake: FakeServer):
    ask(fake, prompt="The fox", suffix="")
    assert fake.engine.requests[0].tokens == fake.tokenizer.encode("The fox")


def test_continuous_usage_counts_up(fake: FakeServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(fake, max_tokens=5, stream_options=options)
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted) and counted[0] >= 1 and counted[-1] == 5
    assert chunks[-1]["choices"] == []
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {1}


def test_obfuscation_that_is_declined_is_no_matter(fake: FakeServer):
    chunks = stream(fake, max_tokens=2, stream_options={"include_obfuscation": False})
    assert "usage" not in chunks[0]


def test_tokens_in_logprobs_can_be_called_by_their_ids(fake: FakeServer):
    asked = {"prompt": [65, 66], "logprobs": 1, "echo": True, "max_tokens": 3}
    fake.engine.reply = lambda request: [21, 22, 0]
    answer = ask(fake, **asked, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert answer["tokens"][:4] == [f"token_id:{token}" for token in (65, 66, 21, 22)]
    assert all(name.startswith("token_id:") for top in answer["top_logprobs"][1:] for name in top)
    assert answer["text_offset"] == ask(fake, **asked)["choices"][0]["logprobs"]["text_offset"]
