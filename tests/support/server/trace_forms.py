"""The forms that the content of one streamed chat with tools takes between HTTP and the engine.

    python -m tests.support.server.trace_forms

Runs one request through the real application and a real EngineClient, whose engine is a script
behind the same sockets, and looks at every value that a function of server/ or runtime/ is called
with or returns (sys.setprofile).  A form is a class whose instances hold words, tokens or sampling
parameters of the request ("in"), or words or tokens of the answer ("out"):

- a dataclass, a msgspec Struct, a pydantic model or a NamedTuple of this repository, by its name;
- a dict with fixed keys, by the function that it first came from.  One inside of another dict is a
  part of that.  A table by the names of tools, as parsers have of schemas, has no fixed keys;
- the classes of a union that stand for one another (those of Delta) are one form.

What counts is whether a value is passed by itself: an object that is first seen inside a form, such
as a Message of a ChatRequest, is a part of it.  Not counted are text, bytes and lists of tokens
without a class around them, ASGI's messages around bytes, and objects that work on content rather
than hold it for another: plain classes such as Choice and AnswerText, and WORKERS.

The tools are not strict, log-probabilities are not asked for and the answer is not stored.
Otherwise there are Grammar, ScoredToken and GeneratedAnswer as well.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import msgspec
import orjson
from pydantic import BaseModel

from runtime.ipc.channel import Receiver, Sender
from runtime.ipc.client import EngineAddress, EngineClient
from runtime.messages import EngineRequest, FromEngine, RequestOutput, StepOutput, ToEngine
from runtime.stats import Stats
from server.app import create_app
from server.batches.background import ask
from server.loaded_model import LoadedModel
from server.metrics.metrics import Metrics
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState
from server.tool_calls.parser.calls import CallReader
from server.tool_calls.parser.deltas import Delta
from server.tool_calls.parser.output import ParserOutput
from server.tool_calls.parser.source import TextSource
from tests.support.paths import ROOT
from tests.support.server.fake_engine import fake_config, ready, write_tokenizer
from tests.support.server.qwen_fake_model import TEMPLATE

ASKED = ("Reykjavik", "Husavik")  # of the messages, and of the tools
TOOL = "weather"
TEMPERATURE = 0.7311
REQUEST = {
    "model": "fake",
    "messages": [{"role": "user", "content": f"Weather in {ASKED[0]}?"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": TOOL,
                "description": f"Not of {ASKED[1]}",
                "parameters": {"type": "object", "description": f"Not {ASKED[1]}"},
            },
        }
    ],
    "temperature": TEMPERATURE,
    "presence_penalty": TEMPERATURE,
    "stream": True,
    "stream_options": {"include_usage": True},
}
SAID = ("quick", "brown", "jumps")  # words of the answer, each a token
ANSWER = (
    " quick brown<tool_call>\n"
    '{"name": "weather", "arguments": {"city": " jumps over"}}\n</tool_call><|end|>'
)
FOLDERS = tuple(f"{ROOT / name}/" for name in ("server", "runtime"))
WORKERS = (TextSource, CallReader, ParserOutput)  # dataclasses that read text and join deltas


def fields_of(value: object) -> Iterator[Any]:
    """What a value of a form's kind holds; nothing of any other object."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, BaseModel):
        yield from value.__dict__.values()
    elif isinstance(value, msgspec.Struct):
        yield from (getattr(value, name) for name in value.__struct_fields__)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield getattr(value, each.name, None)


def is_value(value: object) -> bool:
    """Whether it is an instance of a class that may be a form."""
    kind = type(value)
    if kind.__module__.partition(".")[0] not in ("server", "runtime") or kind in WORKERS:
        return False
    named_tuple = isinstance(value, tuple) and hasattr(kind, "_fields")
    fields = isinstance(value, BaseModel | msgspec.Struct) or dataclasses.is_dataclass(kind)
    return named_tuple or fields


@dataclass
class Forms:
    """The forms of one direction, with the number of objects."""

    words: tuple[str, ...]
    tokens: set[int]
    packed: list[bytes]  # the tokens as StepOutput has them
    numbers: tuple[float, ...] = ()
    seen: dict[int, object] = field(default_factory=dict)  # id -> object, which keeps its id
    parts: dict[int, object] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def holds(self, value: object, depth: int = 8) -> bool:
        if isinstance(value, str):
            return any(word in value for word in self.words)
        if isinstance(value, float):
            return value in self.numbers
        if isinstance(value, list) and value and isinstance(value[0], int):
            return not self.tokens.isdisjoint(value)
        if isinstance(value, StepOutput) and any(each in value.tokens for each in self.packed):
            return True
        return depth > 0 and any(self.holds(each, depth - 1) for each in fields_of(value))

    def look(self, value: object, where: str) -> None:
        """Note what is passed: a value, or a list of values."""
        if isinstance(value, list) or type(value) is tuple:
            for each in value[:64]:
                self.look(each, where)
            return
        form = is_value(value)
        if type(value) is dict and value.keys() <= {TOOL}:
            return
        if id(value) in self.seen or id(value) in self.parts or not (form or type(value) is dict):
            return
        if self.holds(value):
            self.seen[id(value)] = value
            alternatives = type(value) in get_args(Delta)
            name = "Delta" if alternatives else type(value).__name__
            self.names[id(value)] = name if form else f"dict of {where}"
            self._note_parts(value)

    def _note_parts(self, value: object, depth: int = 8) -> None:
        for each in fields_of(value):
            if isinstance(each, dict) and isinstance(value, dict | list):
                self.names.pop(id(each), None)
            self.parts[id(each)] = each
            if depth:
                self._note_parts(each, depth - 1)

    def counts(self) -> Counter[str]:
        return Counter(self.names.values())


def tracing(directions: list[Forms]) -> Callable[[FrameType, str, Any], None]:
    """For sys.setprofile."""

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(FOLDERS):
            return
        returned = event == "return"
        passed_by = frame if returned else frame.f_back or frame
        for value in [arg] if returned else list(frame.f_locals.values()):
            for forms in directions:
                forms.look(value, passed_by.f_code.co_qualname)

    return trace


async def engine(own: str, client: str, tokens: list[int]) -> None:
    """Answers with these tokens, one a step."""
    receiver = Receiver(own, msgspec.msgpack.Decoder(ToEngine))
    sender: Sender[FromEngine] = Sender(client)
    try:
        sender.send(ready(4096))
        while True:
            await asyncio.sleep(0.002)
            for message in receiver.receive():
                if isinstance(message, EngineRequest):
                    await answer(message.id, sender, tokens)
    finally:
        receiver.close()
        sender.close()


async def answer(id: int, sender: Sender[FromEngine], tokens: list[int]) -> None:
    first = RequestOutput(id, tokens[:1], started=time.monotonic())
    sender.send(StepOutput([first], Stats()))
    for token in tokens[1:-1]:
        await asyncio.sleep(0.002)
        packed = array("q", [id]).tobytes(), array("i", [token]).tobytes()
        sender.send(StepOutput([], Stats(), *packed))
    sender.send(StepOutput([RequestOutput(id, tokens[-1:], "stop", tokens[-1])], Stats()))


async def traced(folder: Path) -> tuple[Counter[str], Counter[str], bytes]:
    """The forms in, the forms out, and the events of the answer."""
    tokenizer = ChatTokenizer.load(
        write_tokenizer(folder, template=TEMPLATE.replace("THINKING", ""))
    )
    said = [tokenizer.encode(f" {word}") for word in SAID]
    assert all(len(each) == 1 for each in said), "a word is not a token"
    marks = {token for each in said for token in each}
    packed = [array("i", [token]).tobytes() for token in marks]
    sent = Forms(ASKED, set(tokenizer.encode("vik?")[:1]), [], (TEMPERATURE,))
    received = Forms(SAID, marks, packed)
    addresses = f"ipc://{folder}/engine", f"ipc://{folder}/api"
    client = EngineClient(0, [EngineAddress(*addresses)])
    await client.start()
    script = asyncio.ensure_future(engine(*addresses, tokenizer.encode(ANSWER)))
    state = ServerState(fake_config(), client, LoadedModel(tokenizer), Metrics())
    app = create_app(state)
    try:
        while client.ready is None:
            await asyncio.sleep(0.01)
        sys.setprofile(tracing([sent, received]))
        try:
            status, body = await ask(app, "/v1/chat/completions", {}, orjson.dumps(REQUEST))
        finally:
            sys.setprofile(None)
        assert status == 200, body
    finally:
        script.cancel()
        await asyncio.gather(script, return_exceptions=True)
        client.close()
        state.grammars.close()
    return sent.counts(), received.counts(), body


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sent, received, _ = asyncio.run(traced(Path(folder)))
    for title, forms in (("in", sent), ("out", received)):
        print(f"{title}: {len(forms)} forms")
        for name, count in forms.items():
            print(f"  {name}  x {count}")


if __name__ == "__main__":
    main()
