"""Parameters of chat requests that the chat template or the prompt's length decide about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import orjson
import pytest

from tests.support.server.fake_engine import CONTEXT, GREETING, TEMPLATE, FakeServer, fake_server

EFFORT = "{% if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}" + TEMPLATE
SWITCH = "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}" + TEMPLATE
BOTH = SWITCH.removesuffix(TEMPLATE) + EFFORT
WORDY = "{{ '[' ~ verbosity ~ ']' if verbosity else '' }}" + TEMPLATE


TEMPLATES = {"plain": TEMPLATE, "effort": EFFORT, "switch": SWITCH, "wordy": WORDY, "both": BOTH}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, FakeServer]]:
    """One for each template."""
    with contextlib.ExitStack() as stack:
        yield {
            kind: stack.enter_context(fake_server(tmp_path_factory.mktemp(kind), template=text))
            for kind, text in TEMPLATES.items()
        }


def post(fake: FakeServer, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": fields.pop("content", "Hi")}]
    body = {"model": "fake", "messages": messages, "max_tokens": 2, **fields}
    return httpx.post(f"{fake.url}/v1/chat/completions", json=body)


def stream(fake: FakeServer, **fields: Any) -> list[dict[str, Any]]:
    lines = post(fake, stream=True, **fields).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def begins(fake: FakeServer) -> str:
    """What stands before the first message in the last prompt."""
    prompt = fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)
    return prompt.partition("<|user|>")[0]


# field and value -> what each template prints before the messages; None: refused
REQUESTED: list[tuple[dict[str, str], dict[str, str | None]]] = [
    ({}, {"plain": "", "effort": "", "switch": "", "wordy": ""}),
    ({"reasoning_effort": "high"}, {"plain": None, "effort": "[effort high]", "switch": None}),
    ({"reasoning_effort": "low"}, {"plain": None, "effort": "[effort low]", "wordy": None}),
    ({"reasoning_effort": "medium"}, {"plain": "", "effort": "[effort medium]", "switch": ""}),
    ({"reasoning_effort": "none"}, {"plain": "", "effort": "[effort none]", "switch": "[False]"}),
    ({"verbosity": "low"}, {"plain": None, "effort": None, "wordy": "[low]"}),
    ({"verbosity": "medium"}, {"plain": "", "wordy": "[medium]"}),
]


@pytest.mark.parametrize(
    ("kind", "asked", "rendered"),
    [(kind, asked, text) for asked, answers in REQUESTED for kind, text in answers.items()],
)
def test_a_field_reaches_the_template_or_is_refused(
    servers: dict[str, FakeServer], kind: str, asked: dict[str, str], rendered: str | None
):
    answer = post(servers[kind], **asked)
    if rendered is None:
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(asked)))
    else:
        assert answer.status_code == 200, answer.text
        assert begins(servers[kind]) == rendered


@pytest.mark.parametrize(
    ("kind", "said"), [("effort", {"reasoning_effort": "low"}), ("switch", {"enable_thinking": 1})]
)
def test_what_is_said_twice_is_refused(
    servers: dict[str, FakeServer], kind: str, said: dict[str, Any]
):
    answer = post(servers[kind], reasoning_effort="none", chat_template_kwargs=said)
    assert answer.status_code == 400
    assert "leave one of them out" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("level", "thinks", "rendered"),
    [
        ("none", False, "[False][effort none]"),
        ("high", True, "[True][effort high]"),
        ("none", True, None),
        ("high", False, None),
        ("medium", False, None),
    ],
)
def test_an_effort_that_the_switch_contradicts_is_refused(
    servers: dict[str, FakeServer], level: str, thinks: bool, rendered: str | None
):
    switch = {"enable_thinking": thinks}
    answer = post(servers["both"], reasoning_effort=level, chat_template_kwargs=switch)
    if rendered is None:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "reasoning_effort"
        assert "`chat_template_kwargs.enable_thinking`" in error["message"]
    else:
        assert answer.status_code == 200, answer.text
        assert begins(servers["both"]) == rendered


def test_a_switch_that_is_a_text_is_refused(servers: dict[str, FakeServer]):
    answer = post(servers["switch"], chat_template_kwargs={"enable_thinking": "false"})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (
        "invalid_type",
        "chat_template_kwargs.enable_thinking",
    )
    assert "send true or false" in error["message"]


@pytest.mark.parametrize(("kind", "rendered"), [("both", "[False]"), ("effort", "[effort none]")])
def test_anthropics_effort_is_nothing_where_thinking_is_disabled(
    servers: dict[str, FakeServer], kind: str, rendered: str
):
    messages = [{"role": "user", "content": "Hi"}]
    off = {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    body = {"model": "fake", "messages": messages, "max_tokens": 2, **off}
    answer = httpx.post(f"{servers[kind].url}/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert begins(servers[kind]) == rendered


def test_a_prediction_changes_nothing(fake: FakeServer):
    plain = post(fake, max_tokens=50).json()
    for content in ("Hello, world!", [{"type": "text", "text": "Hello"}]):
        hinted = post(fake, max_tokens=50, prediction={"type": "content", "content": content})
        assert hinted.json()["choices"] == plain["choices"]
        assert hinted.json()["usage"] == plain["usage"]
    details = plain["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


def test_truncation_keeps_the_end_of_the_conversation(fake: FakeServer):
    post(fake)
    whole = fake.engine.requests[-1].tokens
    answer = post(fake, truncate_prompt_tokens=4)
    assert fake.engine.requests[-1].tokens == whole[-4:]
    assert answer.json()["usage"]["prompt_tokens"] == 4


def test_truncation_on_the_right_keeps_the_beginning(fake: FakeServer):
    post(fake)
    whole = fake.engine.requests[-1].tokens
    post(fake, truncate_prompt_tokens=4, truncation_side="right")
    assert fake.engine.requests[-1].tokens == whole[:4]
    post(fake, content="fox " * 5000, truncate_prompt_tokens=4, truncation_side="right")
    assert len(fake.engine.requests[-1].tokens) == 4


@pytest.mark.parametrize(("fields", "room"), [({"max_tokens": 16}, CONTEXT - 16), ({}, None)])
def test_a_conversation_that_is_too_long_is_cut_to_what_fits(
    fake: FakeServer, fields: dict[str, Any], room: int | None
):
    answer = post(fake, content="fox " * 5000, truncate_prompt_tokens=-1, **fields)
    assert answer.status_code == 200, answer.text
    assert len(fake.engine.requests[-1].tokens) == (room or CONTEXT - 2)


def test_a_cut_that_leaves_too_much_is_still_too_long(fake: FakeServer):
    answer = post(fake, content="fox " * 5000, truncate_prompt_tokens=10_000)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_token_ids_are_returned_of_prompt_and_answers(fake: FakeServer):
    fake.engine.reply = lambda request: [20 + request.id, 21, 0]
    answer = post(fake, n=2, max_tokens=9, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == fake.engine.requests[0].tokens
    assert [choice["token_ids"] for choice in answer["choices"]] == [[21, 21, 0], [22, 21, 0]]
    assert not {"prompt_token_ids", "token_ids"} & {*(plain := post(fake).json())}
    assert "token_ids" not in plain["choices"][0]


def test_tokens_in_logprobs_can_be_called_by_their_ids(fake: FakeServer):
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    fake.engine.reply = lambda request: [21, 22, 0]
    plain = post(fake, **asked).json()["choices"][0]["logprobs"]["content"]
    named = post(fake, **asked, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in named["content"]][:2] == ["token_id:21", "token_id:22"]
    for one, other in zip(plain, named["content"], strict=True):
        assert (one["bytes"], one["logprob"]) == (other["bytes"], other["logprob"])
        assert all(top["token"].startswith("token_id:") for top in other["top_logprobs"])
        assert len(one["top_logprobs"]) == len(other["top_logprobs"]) == 2
    [first, *_] = [
        entry
        for chunk in stream(fake, **asked, return_tokens_as_token_ids=True)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert first["token"] == "token_id:21"


@pytest.mark.parametrize("fields", [{}, {"stop": "wor"}, {"logprobs": True, "top_logprobs": 1}])
def test_a_stream_returns_the_token_ids_as_they_come(fake: FakeServer, fields: dict[str, Any]):
    asked = {"max_tokens": 50, "return_token_ids": True, **fields}
    plain = post(fake, **asked).json()
    chunks = stream(fake, **asked)
    assert chunks[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    choices = [chunk["choices"][0] for chunk in chunks]
    said = [token for choice in choices for token in choice.get("token_ids", [])]
    assert said == plain["choices"][0]["token_ids"]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == plain["choices"][0]["message"]["content"]


def test_a_long_answer_with_wide_characters_loses_no_token_id(fake: FakeServer):
    fake.say(GREETING)
    tokens = [*fake.tokenizer.encode(GREETING), 0]
    chunks = stream(fake, max_tokens=50, return_token_ids=True)
    assert tokens == [t for c in chunks for t in c["choices"][0].get("token_ids", [])]


def test_timings_are_in_each_choice_and_in_its_last_chunk(fake: FakeServer):
    [first, second] = post(fake, timings=True, n=2).json()["choices"]
    assert first["timings"]["completion_tokens"] == second["timings"]["completion_tokens"] == 2
    *chunks, last = stream(fake, timings=True, max_tokens=3)
    assert not any("timings" in chunk["choices"][0] for chunk in chunks)
    assert last["choices"][0]["timings"]["completion_tokens"] == 3
    assert "timings" not in post(fake).json()["choices"][0]


def test_the_answers_id_finds_its_record(fake: FakeServer):
    id = post(fake).json()["id"]
    record = httpx.get(f"{fake.url}/v1/requests/{id}").json()
    assert (f"chatcmpl-{record['id']}", record["route"]) == (id, "chat")


def test_continuous_usage_counts_up(fake: FakeServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(fake, max_tokens=5, stream_options=options)
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted) and counted[-1] == 5
    assert chunks[-1]["choices"] == []
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {
        len(fake.engine.requests[0].tokens)
    }


def test_the_logprobs_of_chosen_tokens_are_shown(fake: FakeServer):
    answer = post(fake, logprobs=True, logprob_token_ids=[65, 66, 67], max_tokens=1).json()
    [entry] = answer["choices"][0]["logprobs"]["content"]
    rendered = [list(fake.tokenizer.token_bytes(token)) for token in (65, 66, 67)]
    assert [top["bytes"] for top in entry["top_logprobs"]] == rendered
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25, -1.25, -2.25]


def test_copies_of_a_greedy_answer_are_equal(fake: FakeServer):
    choices = post(fake, n=3, temperature=0, max_tokens=50).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 1
    assert [choice["index"] for choice in choices] == [0, 1, 2]


@pytest.mark.parametrize("tier", [None, "auto", "default"])
def test_a_requested_service_tier_is_answered_with_the_used_one(fake: FakeServer, tier: str | None):
    fields: Any = {"service_tier": tier, "stream_options": {"include_usage": True}}
    whole = post(fake, service_tier=tier).json()
    answers = [whole, *stream(fake, n=2, logprobs=True, **fields), *stream(fake, **fields)]
    assert len(answers) > 6
    for part in answers:
        assert ("service_tier" in part) == (tier is not None)
        assert part.get("service_tier") in (None, "default")


def test_openais_client_finds_the_tier(fake: FakeServer):
    asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    chats = fake.client().chat.completions
    assert chats.create(**asked, service_tier="auto").service_tier == "default"
    assert {
        part.service_tier for part in chats.create(**asked, service_tier="auto", stream=True)
    } == {"default"}
