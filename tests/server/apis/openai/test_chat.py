"""Chat completions through the real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest

from runtime.messages import EngineRequest, RequestOutput, TokenLogprob
from server.apis.openai import chat_answer, completions
from server.generation import logprobs
from tests.support.server.fake_engine import GREETING, VOCAB, FakeServer, fake_server

HELLO: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}


def prompt_of(fake: FakeServer) -> str:
    return fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)


def test_an_answer_has_every_field_of_openais(fake: FakeServer):
    answer = fake.client().chat.completions.create(**HELLO)
    [choice] = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", "fake")
    assert answer.id.startswith("chatcmpl-") and answer.created > 1_700_000_000
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", GREETING)
    assert choice.message.refusal is None
    usage = answer.usage
    assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == len(fake.tokenizer.encode(GREETING)) + 1
    assert usage.prompt_tokens_details and usage.completion_tokens_details


def test_a_stream_spells_the_answer(fake: FakeServer):
    chunks = list(fake.client().chat.completions.create(**HELLO, stream=True))
    texts = [chunk.choices[0].delta.content for chunk in chunks]
    assert texts[0] == "" and chunks[0].choices[0].delta.role == "assistant"
    assert texts[-1] is None and chunks[-1].choices[0].finish_reason == "stop"
    assert "".join(text or "" for text in texts) == GREETING
    assert not any("\ufffd" in text for text in texts if text)


async def test_64_streams_at_once_spell_their_own_answers(fake: FakeServer):
    fake.engine.delay = 0.001
    fake.engine.reply = lambda request: request.tokens[1:-2] * 3 + [0]

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": f"number {number}"}],
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with fake.async_client() as client:
        answers = await asyncio.gather(*[one(client, number) for number in range(64)])
    assert answers == [f"number {number}" * 3 for number in range(64)]


def test_a_conversation_goes_through_the_template(fake: FakeServer):
    fake.client().chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"},
                                         {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )  # fmt: skip
    assert prompt_of(fake) == (
        "<|system|>be brief<|end|><|user|>a\nb<|end|><|assistant|>c<|end|>"
        "<|user|>d<|end|><|assistant|>"
    )


def test_an_answer_can_be_sent_back_as_it_came(fake: FakeServer):
    client = fake.client()
    message = client.chat.completions.create(**HELLO).choices[0].message
    again = {"messages": [*HELLO["messages"], message.model_dump(exclude_none=True)]}
    client.chat.completions.create(**(HELLO | again))
    raw = {"role": "assistant", "content": "x", "refusal": None}
    client.chat.completions.create(**(HELLO | {"messages": [*HELLO["messages"], raw]}))
    assert prompt_of(fake).endswith("<|assistant|>x<|end|><|assistant|>")


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": [{"type": "refusal", "refusal": "No."}], "refusal": None},
        {"content": [{"type": "text", "text": "Well:"}, {"type": "refusal", "refusal": "No."}]},
    ],
)
def test_a_refusal_that_is_sent_back_is_what_the_assistant_said(fake: FakeServer, said: Any):
    messages = [*HELLO["messages"], {"role": "assistant", **said}, *HELLO["messages"]]
    fake.client().chat.completions.create(**(HELLO | {"messages": messages}))
    text = "Well:\nNo." if len(said["content"] or ()) == 2 else "No."
    assert f"<|assistant|>{text}<|end|><|user|>" in prompt_of(fake)


def test_an_answer_of_another_server_without_calls_can_be_sent_back(fake: FakeServer):
    said = {"role": "assistant", "content": "Hi.", "tool_calls": [], "reasoning_content": None}
    body = {"model": "fake", "messages": [*HELLO["messages"], said, *HELLO["messages"]]}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "<|assistant|>Hi.<|end|><|user|>" in prompt_of(fake)


def test_the_final_message_can_be_continued(fake: FakeServer):
    last = {"role": "assistant", "content": "It is"}
    body = HELLO | {"messages": [*HELLO["messages"], last], "continue_final_message": True}
    assert httpx.post(f"{fake.url}/v1/chat/completions", json=body).status_code == 200
    assert prompt_of(fake).endswith("<|assistant|>It is")


def test_the_generation_prompt_can_be_left_out(fake: FakeServer):
    body = HELLO | {"add_generation_prompt": False}
    assert httpx.post(f"{fake.url}/v1/chat/completions", json=body).status_code == 200
    assert prompt_of(fake) == "<|user|>Hello<|end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_n_completions_have_an_index_each(fake: FakeServer, stream: bool):
    fake.engine.reply = lambda request: [10 + request.id] * 3 + [0]
    base = len(fake.engine.requests)
    answer: Any = fake.client().chat.completions.create(**HELLO, n=3, stream=stream)
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in answer:
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in answer.choices}
    expected = [fake.tokenizer.decode([10 + base + copy + 1] * 3) for copy in range(3)]
    assert [texts[index] for index in range(3)] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_every_token_and_its_alternatives(fake: FakeServer, stream: bool):
    answer: Any = fake.client().chat.completions.create(
        **HELLO, logprobs=True, top_logprobs=2, stream=stream
    )
    if stream:
        parts = [c.choices[0].logprobs for c in answer]
        entries = [entry for part in parts if part for entry in part.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == f"{GREETING}<|end|>".encode()
    tokens = [*fake.tokenizer.encode(GREETING), 0]
    for entry, token in zip(entries, tokens, strict=True):
        assert entry.logprob == -0.25
        assert [top.logprob for top in entry.top_logprobs] == [-0.25, -1.25]
        following = fake.tokenizer.token_bytes((token + 1) % VOCAB)
        assert bytes(entry.top_logprobs[1].bytes) == following


def test_logprobs_without_alternatives_have_an_empty_list(fake: FakeServer):
    answer = fake.client().chat.completions.create(**HELLO, logprobs=True)
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content and all(entry.top_logprobs == [] for entry in content)


ENDS: list[dict[str, Any]] = [
    {},  # the model's own end
    {"stop": " w\u00f6r"},
    {"stop": ["zzz", "."]},
    {"stop_token_ids": ","},
    {"stop_token_ids": ",", "include_stop_str_in_output": True},
    {"stop": "Bye", "include_stop_str_in_output": True},
    {"max_tokens": 7},
    {"ignore_eos": True},
    {"skip_special_tokens": False},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("end", ENDS, ids=str)
def test_every_token_that_was_generated_has_an_id_a_logprob_and_counts_in_usage(
    fake: FakeServer, end: dict[str, Any], step: int, stream: bool
):
    fake.engine.step = step
    body = HELLO | {"logprobs": True, "return_token_ids": True, "stream": stream} | end
    if "stop_token_ids" in end:
        body["stop_token_ids"] = fake.tokenizer.encode(end["stop_token_ids"])
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body)
    ids: list[int] = []
    entries: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    for part in parts_of(answer.text) if stream else [answer.json()]:
        usage = part["usage"] or usage
        for choice in part["choices"]:
            ids += choice.get("token_ids") or []
            entries += (choice["logprobs"] or {"content": []})["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == list(
        map(fake.tokenizer.token_bytes, ids)
    )
    assert len(ids) == usage["completion_tokens"] > 0
    sent = [*fake.tokenizer.encode(GREETING), 0]
    assert ids == sent[: len(ids)]
    assert (ids[-1] == 0) == (not {"stop", "stop_token_ids", "max_tokens"} & {*end})


def parts_of(stream: str) -> list[dict[str, Any]]:
    lines = stream.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_without_text_keeps_its_logprob_where_a_grammar_ends_the_answer(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    """Then the engine ends the request between two tokens."""

    def outputs(request: EngineRequest) -> Iterator[RequestOutput]:
        yield RequestOutput(request.id, [1], logprobs=[TokenLogprob(-0.5, 1, [])])
        yield RequestOutput(request.id, [], "stop")

    monkeypatch.setattr(fake.engine, "_outputs", outputs)
    answer: Any = fake.client().chat.completions.create(**HELLO, logprobs=True, stream=stream)
    parts = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    assert [e.token for part in parts if part for e in part.content] == ["<|system|>"]


def test_a_stop_tokens_logprob_is_that_of_its_own_text(fake: FakeServer):
    fake.say("Hi")
    [choice] = fake.client().chat.completions.create(**HELLO, logprobs=True).choices
    assert choice.message.content == "Hi" and choice.logprobs
    last = (choice.logprobs.content or [])[-1]
    assert (last.token, last.logprob) == ("<|end|>", -0.25)


def test_prompt_logprobs_come_with_the_answer(fake: FakeServer):
    body = HELLO | {"prompt_logprobs": 1}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body).json()
    first, *rest = answer["prompt_logprobs"]
    assert first is None and len(rest) == answer["usage"]["prompt_tokens"] - 1
    token = fake.engine.requests[-1].tokens[1]
    assert rest[0] == {str(token): {"logprob": -0.25, "rank": 1, "decoded_token": "Hello"}}


def test_the_client_raises_the_right_errors(fake: FakeServer):
    client = fake.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO["messages"])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**HELLO, max_tokens=100_000)
    assert wrong.value.code == "context_length_exceeded"
    # The words by which LangChain, LiteLLM and others recognize it.
    assert "This model's maximum context length is 256 tokens. However, " in str(wrong.value)
    fake.engine.fail_after = 1
    with pytest.raises(openai.APIError, match="a seeded fault"):
        list(client.chat.completions.create(**HELLO, stream=True))


def test_models_are_listed_and_described(fake: FakeServer):
    client = fake.client()
    models = client.models.list().data
    assert [model.id for model in models] == ["fake", "alias"]
    model = client.models.retrieve("alias")
    assert (model.object, model.owned_by) == ("model", "wavefill")
    assert model.model_dump()["max_model_len"] == 256


def test_an_alias_answers_under_its_own_name(fake: FakeServer):
    assert fake.client().chat.completions.create(**(HELLO | {"model": "alias"})).model == "alias"


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize_are_inverse(fake: FakeServer, prefix: str):
    def post(route: str, body: dict[str, object]) -> dict[str, Any]:
        return httpx.post(f"{fake.url}{prefix}/{route}", json=body).json()

    answer = post("tokenize", {"prompt": GREETING, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert post("detokenize", {"tokens": answer["tokens"]}) == {"prompt": GREETING}
    fake.client().chat.completions.create(**HELLO)
    chat = post("tokenize", {"model": "fake", "messages": HELLO["messages"]})
    assert chat["tokens"] == fake.engine.requests[-1].tokens


def test_streams_go_on_while_a_long_text_is_tokenized(fake: FakeServer):
    # Over the limit below which it is done at once, and still within the context by its length.
    text = " jumps over" * 1600
    answer = httpx.post(f"{fake.url}/tokenize", json={"prompt": text})
    assert answer.status_code == 400
    answer = httpx.post(f"{fake.url}/detokenize", json={"tokens": [5] * 20_000})
    assert len(answer.json()["prompt"]) == 20_000


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_streams_go_on_while_many_log_probabilities_are_written(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, kind: str
):
    write: Any = getattr(logprobs, f"{kind}_logprobs")
    on_loop: list[bool] = []

    def watched(*args: Any, **more: Any) -> object:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_loop.append(False)
        else:
            on_loop.append(True)
        return write(*args, **more)

    answer = {"chat": chat_answer, "text": completions}[kind]
    monkeypatch.setattr(answer, f"{kind}_logprobs", watched)
    for copies in (1, 128):
        if kind == "chat":
            chat: Any = {**HELLO, "logprobs": True, "top_logprobs": 20, "n": copies}
            fake.client().chat.completions.create(**chat)
        else:
            fake.client().completions.create(model="fake", prompt="Hi", logprobs=5, n=copies)
    assert on_loop == [True] + [False] * 128


def test_a_model_without_a_template_answers_completions_only(tmp_path):
    with fake_server(tmp_path, template=None) as server:
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            server.client().chat.completions.create(**HELLO)
        assert (caught.value.code, caught.value.param) == ("no_chat_template", "messages")
        assert server.client().completions.create(model="fake", prompt="Hello").choices[0].text
