"""A server in this process whose engine is a script: HTTP, text and streams without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar

import uvicorn
from openai import AsyncOpenAI, OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.ipc.client import Mailbox
from runtime.messages import (
    BACKGROUND,
    EngineRequest,
    FinishReason,
    Progress,
    PromptImage,
    Ready,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from runtime.snapshot import Snapshot
from runtime.stats import Stats
from server.app import create_app
from server.batches.store import BatchStore
from server.config import ServerConfig
from server.http.connection import BoundedProtocol
from server.http.connection_limit import ConnectionLimit
from server.images.reader import ImageReader
from server.loaded_model import LoadedModel
from server.metrics.metrics import Metrics
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState
from server.telemetry.requests import Tracing

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = ["Hello, world! The quick brown fox jumps over the lazy dog. stop STOP 0123456789 "] * 8
GREETING = "Hello, w\u00f6rld! \N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-5} Bye."
CONTEXT = 256
HIDDEN = 24
VOCAB = 400  # more than the tokenizer knows, as models pad their vocabulary


def write_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, special: Sequence[str] = ()
) -> Path:
    """A byte-level BPE of about 360 words, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[AddedToken(word, special=True) for word in special or SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ready(context: int = CONTEXT, *, reads_images: bool = False) -> Ready:
    return Ready(
        epoch=1,
        model_type="fake",
        device="cpu",
        dtype="float32",
        attention="mha",
        vocab_size=VOCAB,
        max_model_len=context,
        page_size=16,
        num_pages=64,
        max_num_seqs=64,
        max_batched_tokens=512,
        weight_bytes=0,
        kv_bytes=0,
        load_seconds=0.0,
        hidden_size=HIDDEN,
        reads_images=reads_images,
    )


def embedding(request: EngineRequest) -> list[float]:
    """The made-up vector of a prompt: how often which tokens occur, or which the last one is."""
    pooling = request.params.pooling
    assert pooling is not None
    tokens = request.tokens if pooling.kind == "mean" else request.tokens[-1:]
    counts = [float(sum(token % HIDDEN == place for token in tokens)) for place in range(HIDDEN)]
    counts = counts[: pooling.dimensions or None]
    length = sum(number**2 for number in counts) ** 0.5 or 1.0
    return [number / length for number in counts] if pooling.normalize else counts


def score(token: int, num_top: int, ids: tuple[int, ...] = ()) -> TokenLogprob:
    """The made-up log-probability of a token: it is the most likely, its neighbours follow.

    ids   instead of them
    """
    shown = ids or [(token + step) % VOCAB for step in range(num_top)]
    top = [(id, -0.25 - place) for place, id in enumerate(shown)]
    return TokenLogprob(-0.25, 1, top)


@dataclass
class FakeEngine:
    """An Engine that answers every request with the tokens of `reply`."""

    reply: Callable[[EngineRequest], list[int]]
    ready: Ready | None = field(default_factory=ready)
    progress: Progress | None = None
    down: str | None = None
    stats: Stats = field(default_factory=Stats)
    delay: float = 0.0  # seconds before each token
    step: int = 1  # tokens an Output
    fail_after: int | None = None  # Outputs before the engine reports an error
    failing: Callable[[EngineRequest], bool] = lambda request: True  # which requests that concerns
    held: bool = False  # no answer at all until released
    cached: int = 0
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    index: int = 0
    others: list[FakeEngine] = field(default_factory=list)  # shown beside it; they get no request
    on_snapshot: Callable[[int, Snapshot], None] | None = None
    snapshot: Snapshot | None = None  # what pages of the dashboard get
    observed: int = 0  # how often one was asked for
    _open: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        return sum(self.requests[id - 1].priority != BACKGROUND for id in self._open)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def unhealthy(self) -> str | None:
        return self.down

    async def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def engines(self) -> list[FakeEngine]:
        return [self, *self.others]

    def stalled(self) -> float:
        return 0.0

    def observe(self, share: bytes, *, watching: bool, engine: int = 0) -> None:
        self.observed += watching
        if self.snapshot is not None and self.on_snapshot is not None:
            asyncio.get_running_loop().call_soon(self.on_snapshot, 0, self.snapshot)

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
        id, now = len(self.requests) + 1, time.monotonic()
        request = EngineRequest(
            id, 0, tokens, params, priority, salt, now, images, generation_prompt_len
        )
        self.requests.append(request)
        mailbox = Mailbox(request)
        self._open[request.id] = asyncio.ensure_future(self._answer(mailbox, self._open))
        return mailbox

    def sent_together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def abort(self, id: int) -> None:
        task = self._open.pop(id, None)
        if task is not None:
            self.aborted.append(id)
            task.cancel()

    async def _answer(self, mailbox: Mailbox, open_ones: dict[int, asyncio.Task[None]]) -> None:
        """open_ones: of this test; the next one has its own, and counts from 1 again."""
        for place, output in enumerate(self._outputs(mailbox.request)):
            await asyncio.sleep(self.delay)
            while self.held:
                await asyncio.sleep(0.005)
            if place == self.fail_after and self.failing(mailbox.request):
                output = RequestOutput(mailbox.id, [], finish="error", error="a seeded fault")
            if output.finish is not None:
                open_ones.pop(mailbox.id, None)
            mailbox.put(output)
            if output.finish is not None:
                return

    def _outputs(self, request: EngineRequest) -> Iterator[RequestOutput]:
        """The reply in steps, ended as the engine ends it: by a stop id or by its length."""
        params = request.params
        if params.pooling is not None:
            numbers = embedding(request)
            data = struct.pack(f"<{len(numbers)}f", *numbers)
            started = request.arrived
            yield RequestOutput(
                request.id, [], "stop", embedding=data, cached=self.cached, started=started
            )
            return
        tokens: list[int] = []
        finish: FinishReason = "length"
        for token in self.reply(request)[: params.max_tokens]:
            tokens.append(token)
            if token in params.stop_ids and len(tokens) > params.min_tokens:
                finish = "stop"
                break
        for start in range(0, len(tokens), self.step):
            new = tokens[start : start + self.step]
            last = start + self.step >= len(tokens)
            yield RequestOutput(
                request.id,
                new,
                finish=finish if last else None,
                stop_id=new[-1] if last and finish == "stop" else None,
                logprobs=None
                if params.logprobs is None
                else [score(token, params.logprobs, params.logprob_ids) for token in new],
                prompt_logprobs=None
                if params.prompt_logprobs is None or start
                else [None, *[score(t, params.prompt_logprobs) for t in request.tokens[1:]]],
                cached=0 if start else self.cached,
                started=0.0 if start else request.arrived,
            )


class Closed(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closed)


@dataclass
class FakeServer:
    """An application with a scripted engine, listening on a port of its own."""

    engine: FakeEngine
    tokenizer: ChatTokenizer
    url: str
    context: int = CONTEXT
    images: ImageReader | None = None  # of a model that reads them
    _clients: list[Closed] = field(default_factory=list)

    def say(self, text: str, *, end: bool = True) -> None:
        """From now on answer with this text."""
        tokens = self.tokenizer.encode(text) + ([0] if end else [])
        self.engine.reply = lambda request: tokens

    def reset(self) -> None:
        """Forget what a test has changed, and close its clients."""
        self.close_clients()
        self.engine.__init__(  # type: ignore[misc]
            reply=self.engine.reply,
            ready=ready(self.context, reads_images=self.images is not None),
            on_snapshot=self.engine.on_snapshot,
        )
        self.say(GREETING)

    def close_clients(self) -> None:
        """Their sockets would be found open while another test runs, which then failed for it."""
        while self._clients:
            self._clients.pop().close()

    def closing(self, client: C) -> C:
        """A client that is closed with this server's others."""
        self._clients.append(client)
        return client

    def client(self, **options: object) -> OpenAI:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)
        return self.closing(client)

    def async_client(self, **options: object) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)


@contextlib.contextmanager
def fake_server(
    folder: Path,
    *,
    template: str | None = TEMPLATE,
    context: int = CONTEXT,
    batches: BatchStore | None = None,
    tracing: Tracing | None = None,
    connections: int = 1000,
    special_in_content: Literal["allow", "text"] = "allow",
    prepared: bool = False,
    images: ImageReader | None = None,
    **config: Any,
) -> Iterator[FakeServer]:
    """Serve the scripted engine from a thread until the block ends.

    context              tokens of a prompt and its answer at most
    tracing              of its requests
    batches              where files are kept; no batch runs
    connections          that are open at most
    special_in_content   of ChatTokenizer.load
    prepared             the folder has a tokenizer and a template already
    images               of a model that reads them; closed at the end
    config               fields of ServerConfig that are set
    """
    if not prepared:
        write_tokenizer(folder, template=template)
    tokenizer = ChatTokenizer.load(folder, special_in_content=special_in_content)
    first = ready(context, reads_images=images is not None)
    engine = FakeEngine(reply=lambda request: [], ready=first)
    state = ServerState(
        fake_config(**config),
        engine,
        LoadedModel(tokenizer, images=images),
        Metrics(),
        batches=batches,
        tracing=tracing,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    protocol: Any = partial(BoundedProtocol, limit=ConnectionLimit(connections))
    settings = uvicorn.Config(
        create_app(state), http=protocol, log_config=None, lifespan="off", ws="none"
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=lambda: server.run([listener]))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    fake = FakeServer(engine, tokenizer, url, context, images)
    fake.say(GREETING)
    try:
        yield fake
    finally:
        fake.close_clients()
        server.should_exit = True
        thread.join(10)
        listener.close()
        state.grammars.close()
        if images is not None:
            images.close()
    assert not thread.is_alive()


def fake_config(**changes: Any) -> ServerConfig:
    return ServerConfig(**{"served_names": ("fake", "alias"), "max_queue": 200} | changes)


class ReportedClient:
    """What the start report reads of an EngineClient with one engine."""

    def __init__(self, ready: Ready | None = None, progress: Progress | None = None) -> None:
        self.ready, self.progress, self.stats = ready, progress, Stats()

    @property
    def engines(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(index=0, ready=self.ready)]
