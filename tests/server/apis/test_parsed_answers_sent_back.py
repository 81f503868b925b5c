"""Answers of parse() and stream() of OpenAI's client, sent back as its objects and as dumps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ParsedChatCompletionMessage
from openai.types.responses import ParsedResponse
from pydantic import BaseModel

from tests.support.server.fake_engine import FakeServer
from tests.support.server.qwen_fake_model import CALL, QUESTION, prompt_of, qwen_server

# The client's own: it dumps an answer that it has parsed.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["parse", "stream"])


class Weather(BaseModel):
    city: str


TOOL = openai.pydantic_function_tool(Weather, name="weather")
SPELLED = '{"city": "Rome"}'
CITED = {"annotations": [{"type": "url_citation", "url": "https://example.com"}]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory) as server:
        yield server


@pytest.fixture
def fake(shared: FakeServer) -> FakeServer:
    return shared


def chat_message(fake: FakeServer, stream: bool, **body: Any) -> ParsedChatCompletionMessage[Any]:
    chat = fake.client().chat.completions
    if not stream:
        return chat.parse(model="fake", messages=QUESTION, **body).choices[0].message
    with chat.stream(model="fake", messages=QUESTION, **body) as events:
        return events.get_final_completion().choices[0].message


def send_back(fake: FakeServer, *messages: Any):
    fake.client().chat.completions.create(model="fake", messages=[*QUESTION, *messages])


def response(fake: FakeServer, stream: bool, **body: Any) -> ParsedResponse[Any]:
    responses = fake.client().responses
    if not stream:
        return responses.parse(model="fake", input=QUESTION, **body)
    with responses.stream(model="fake", input=QUESTION, **body) as events:
        return events.get_final_response()


@WAYS
def test_a_chat_message_that_was_parsed_may_be_sent_back(fake: FakeServer, stream: bool):
    fake.say(SPELLED)
    said = chat_message(fake, stream, response_format=Weather)
    assert said.parsed == Weather(city="Rome")
    fake.say(CALL)
    called = chat_message(fake, stream, tools=[TOOL])
    assert called.tool_calls and called.tool_calls[0].function.parsed_arguments
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny."}
    dump = said.model_dump()
    for again in (said, dump, said.model_dump(exclude_unset=True), dump | CITED):
        send_back(fake, again, *QUESTION)
        assert f"<|assistant|>{SPELLED}<|end|>" in prompt_of(fake)
    for again in (called, called.model_dump(), called.model_dump(exclude_unset=True)):
        send_back(fake, again, result)
        assert f'"arguments": {SPELLED}}}</tool_call>' in prompt_of(fake)


@WAYS
def test_items_that_were_parsed_may_be_sent_back(fake: FakeServer, stream: bool):
    fake.say(SPELLED)
    said = response(fake, stream, text_format=Weather)
    assert said.output_parsed == Weather(city="Rome")
    fake.say(CALL)
    function = {"type": "function", **TOOL["function"]}
    called = response(fake, stream, tools=[function])
    call = called.output[0]
    assert call.type == "function_call" and call.parsed_arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    for answer, behind in ((said, QUESTION), (called, [result])):
        dumps = [item.model_dump() for item in answer.output]
        for again in (answer.output, dumps):
            input: Any = [*QUESTION, *again, *behind]
            fake.client().responses.create(model="fake", input=input)
            assert SPELLED in prompt_of(fake)


def test_the_tools_of_a_response_may_be_sent_again(fake: FakeServer):
    client = fake.client()
    custom: Any = {"type": "custom", "name": "run"}
    tools: Any = [{"type": "function", **TOOL["function"]}, custom]
    made = client.responses.create(model="fake", input=QUESTION, tools=tools)
    again: Any = [tool.model_dump() for tool in made.tools]
    prompt = prompt_of(fake)
    client.responses.create(model="fake", input=QUESTION, tools=again)
    assert prompt_of(fake) == prompt


def test_what_clients_note_on_an_item_is_not_kept(fake: FakeServer):
    fake.say("Sunny.")
    text = {"type": "output_text", "text": SPELLED, "parsed": {"city": "Rome"}} | CITED
    item = {"type": "message", "role": "assistant", "phase": "final_answer", "content": [text]}
    client = fake.client()
    input: Any = [*QUESTION, item, *QUESTION]
    made = client.responses.create(model="fake", input=input)
    _, kept, _ = client.responses.input_items.list(made.id)
    dump = kept.model_dump(exclude_unset=True)
    assert dump["content"] == [{"type": "output_text", "text": SPELLED, "annotations": []}]
    assert "phase" not in dump


def test_a_breakpoint_of_the_cache_is_no_part_of_an_item(fake: FakeServer):
    text = {"type": "input_text", "text": "Weather?"}
    marked: Any = text | {"prompt_cache_breakpoint": {"mode": "explicit"}}
    client = fake.client()
    made = client.responses.create(model="fake", input=[{"role": "user", "content": [marked]}])
    [kept] = client.responses.input_items.list(made.id)
    assert kept.model_dump(exclude_unset=True)["content"] == [text]
    again: Any = [kept.model_dump()]  # with prompt_cache_breakpoint null
    assert client.responses.create(model="fake", input=again).status == "completed"


def test_a_phase_that_openai_does_not_know_is_refused(fake: FakeServer):
    wrong: Any = [{"role": "assistant", "phase": "draft", "content": "Sunny."}, *QUESTION]
    with pytest.raises(openai.BadRequestError, match=r"`input\[0\].phase` is \"draft\""):
        fake.client().responses.create(model="fake", input=wrong)
