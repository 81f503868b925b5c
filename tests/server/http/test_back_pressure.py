"""A client that does not read: its tokens wait together, those of other clients do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.ipc.client import Mailbox
from runtime.messages import EngineRequest, PromptImage, RequestOutput, SamplingParams
from server.apis.openai.chat_answer import ChatAnswer
from server.apis.openai.chat_schema import ChatRequest
from server.generation.chat_request import prepare_chat
from server.http.validation import parse
from server.loaded_model import LoadedModel
from server.metrics.metrics import Metrics
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState
from tests.support.server.fake_engine import FakeEngine, fake_config, write_tokenizer

BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "stream": True}


class HeldEngine(FakeEngine):
    """Answers with what the test puts into its mailboxes."""

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        images: tuple[PromptImage, ...] = (),
        generation_prompt_len: int = 0,
    ) -> Mailbox:
        request = EngineRequest(len(self.requests) + 1, 0, tokens, params, priority, salt, 1.0)
        self.requests.append(request)
        self.mailbox = Mailbox(request)
        return self.mailbox

    def abort(self, id: int) -> None:
        self.aborted.append(id)


class SlowReader:
    """A client that reads while `reads` is set; what it was sent."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.frames: list[bytes] = []
        self.at_once = 0

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.frames.append(data)

    def write_now(self, data: bytes) -> bool:
        if self.reads.is_set() and self.frames:
            self.frames.append(data)
            self.at_once += 1
            return True
        return False

    @property
    def texts(self) -> list[str]:
        """The content of each chunk that has some."""
        lines = b"".join(self.frames).decode().split("\n\n")[:-1]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        return [delta["content"] for delta in deltas if delta.get("content")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tokens_wait_together_while_the_client_does_not_read(folder: Path) -> None:
    engine = HeldEngine(reply=lambda request: [])
    tokenizer = ChatTokenizer.load(folder)
    state = ServerState(fake_config(), engine, LoadedModel(tokenizer), Metrics())
    body = parse(ChatRequest, dict(BODY), {})
    generation = await prepare_chat(state, body, b"")
    reader = SlowReader()
    streaming = asyncio.ensure_future(ChatAnswer(state, body, generation).stream(reader))
    tokens = tokenizer.encode("a b c d e f g h i j k l", add_special_tokens=False)
    words = [tokenizer.decode([token]) for token in tokens]

    def put(*places: int) -> None:
        for place in places:
            engine.mailbox.put(RequestOutput(engine.mailbox.id, [tokens[place]]))

    await settled()
    put(0)
    await settled()
    put(1, 2)
    assert reader.texts == words[:3] and reader.at_once == 2, "each token has a frame of its own"
    reader.reads.clear()
    put(3)
    await settled()
    put(4, 5, 6, 7)
    await settled()
    assert reader.texts == words[:3]
    reader.reads.set()
    await settled()
    assert reader.texts == [*words[:4], "".join(words[4:8])], "what waited is one frame"
    put(8)
    await settled()
    assert reader.texts[-1] == words[8]
    engine.mailbox.put(RequestOutput(engine.mailbox.id, [tokens[9]], finish="length"))
    await asyncio.wait_for(streaming, 5)
    generation.close()
    assert "".join(reader.texts) == "".join(words[:10]) and engine.aborted == []
