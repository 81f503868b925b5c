"""Admission slots are reserved before any work, and released by everything that ends early."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.types import Message

from runtime.ipc.client import Mailbox
from runtime.messages import RequestOutput
from server.constrained.grammar_client import GrammarChecker
from server.generation.embeddings import EmbeddingInput
from server.prompt.tokenizer import ChatTokenizer
from tests.support.server.batch_server import CHAT, BatchServer, batch_server
from tests.support.server.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hello"}]
HELLO: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO | FORM),
    (CHAT, HELLO | {"n": 3, "stream": True}),
    ("/v1/completions", {"model": "fake", "prompt": ["a", "b"], "n": 2} | FORM),
    ("/v1/responses", {"model": "fake", "input": "Hello", "truncation": "auto", "store": False}),
    ("/v1/messages", HELLO | {"max_tokens": 4}),
    ("/api/chat", HELLO | {"format": "json"}),
    ("/api/generate", {"model": "fake", "prompt": "Hello"}),
    ("/api/generate", {"model": "fake", "prompt": "Hello", "raw": True}),
    ("/v1/embeddings", {"model": "fake", "input": ["a", "b", "c"]}),
    ("/v1/score", {"model": "fake", "text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"model": "fake", "query": "a", "documents": ["b"]}),
    ("/api/embed", {"model": "fake", "input": ["a", "b"]}),
    ("/api/embeddings", {"model": "fake", "prompt": "a"}),
]


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path, max_queue=6) as server:
        yield server


def all_released(server: BatchServer) -> bool:
    return server.state.admission.reserved == 0 and server.engine.num_open == 0


async def until_released(server: BatchServer) -> None:
    async with asyncio.timeout(10):
        while not all_released(server):
            await asyncio.sleep(0.005)


async def until_submitted(server: BatchServer, count: int) -> None:
    async with asyncio.timeout(10):
        while server.engine.num_open < count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_full_server_refuses_before_it_renders_tokenizes_or_compiles(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
):
    worked: list[str] = []

    def spy(kind: type, name: str) -> None:
        own = getattr(kind, name)

        def noting(*args: Any, **options: Any) -> Any:
            worked.append(name)
            return own(*args, **options)

        monkeypatch.setattr(kind, name, noting)

    for kind, name in (
        (ChatTokenizer, "render"),
        (ChatTokenizer, "encode"),
        (EmbeddingInput, "tokens"),
        (GrammarChecker, "check"),
    ):
        spy(kind, name)
    with monkeypatch.context() as full:
        full.setattr(FakeEngine, "pending", property(lambda engine: 200))
        answer = await server.http.post(path, json=body)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1", answer.text
        assert worked == []
    assert (await server.http.post(path, json=body)).status_code == 200
    assert worked, "the spies see the work"
    assert all_released(server)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "message": (CHAT, HELLO | {"messages": [{"role": "tool", "content": "x"}]}),
    "context": (CHAT, HELLO | {"max_tokens": 100_000}),
    "characters": (CHAT, {"model": "fake", "messages": [{"role": "user", "content": "x" * 99999}]}),
    "token": ("/v1/completions", {"model": "fake", "prompt": [[1], [99999]]}),
    "bias": (CHAT, HELLO | {"logit_bias": {"99999": 1}}),
    "grammar": (CHAT, HELLO | {"structured_outputs": {"grammar": "start: ("}}),
    "scores": (CHAT, HELLO | {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 99999}),
    "truncated": ("/v1/responses", {"model": "fake", "input": "x", "max_output_tokens": 99999}),
    "previous": ("/v1/responses", {"model": "fake", "input": "x", "previous_response_id": "r"}),
    "raw": ("/api/generate", {"model": "fake", "prompt": "x" * 9999, "raw": True}),
    "text": ("/v1/embeddings", {"model": "fake", "input": ["a", "x" * 99999]}),
    "vocabulary": ("/v1/embeddings", {"model": "fake", "input": [[1], [99999]]}),
    "embed": ("/api/embed", {"model": "fake", "input": ["x " * 9999], "truncate": False}),
}


@pytest.mark.parametrize("stage", WRONG)
async def test_a_refusal_at_any_stage_releases_its_admission_slots(server: BatchServer, stage: str):
    path, body = WRONG[stage]
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert server.engine.requests == []
    assert all_released(server)


async def test_a_template_that_fails_releases_the_admission_slots(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object, **options: object) -> str:
        assert server.state.admission.used == 5, "they are reserved while it renders"
        raise RuntimeError("a seeded fault")

    monkeypatch.setattr(ChatTokenizer, "render", fail)
    with pytest.raises(RuntimeError, match="a seeded fault"):
        await server.http.post(CHAT, json=HELLO | {"n": 5})
    assert all_released(server)


async def test_a_submission_that_fails_halfway_leaves_nothing_behind(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
):
    submit = FakeEngine.submit

    def fail(engine: FakeEngine, *args: Any, **options: Any) -> Mailbox:
        if len(engine.requests) == 2:
            raise RuntimeError("a seeded fault")
        return submit(engine, *args, **options)

    monkeypatch.setattr(FakeEngine, "submit", fail)
    server.engine.held = True
    with pytest.raises(RuntimeError, match="a seeded fault"):
        await server.http.post(CHAT, json=HELLO | {"n": 5})
    assert sorted(server.engine.aborted) == [1, 2]
    assert all_released(server)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_client_that_disconnects_releases_the_admission_slots(
    server: BatchServer, path: str, body: dict[str, Any]
):
    server.engine.held = True
    gone = asyncio.Event()
    sent = [httpx.Request("POST", "http://test", json=body).content]

    async def receive() -> Message:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }
    app: Any = server.http._transport.app  # type: ignore[attr-defined]
    asking = asyncio.create_task(app(scope, receive, send))
    await until_submitted(server, 1)
    gone.set()
    await asking
    assert all_released(server) and server.engine.aborted


async def test_a_request_that_is_cancelled_while_its_grammar_compiles_releases_its_admission_slots(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
):
    begun = asyncio.Event()

    async def wait(*args: object) -> str:
        begun.set()
        return await asyncio.Event().wait() or ""  # type: ignore[return-value]

    monkeypatch.setattr(GrammarChecker, "check", wait)
    asking = asyncio.create_task(server.http.post(CHAT, json=HELLO | FORM | {"n": 4}))
    await begun.wait()
    assert server.state.admission.used == 4
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert all_released(server)


async def test_requests_whose_prompts_are_being_made_count(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
):
    go_on, check = asyncio.Event(), GrammarChecker.check

    async def wait(*args: Any) -> str:
        await go_on.wait()
        return await check(*args)

    monkeypatch.setattr(GrammarChecker, "check", wait)
    asking = asyncio.create_task(server.http.post(CHAT, json=HELLO | FORM | {"n": 128}))
    while server.state.admission.reserved < 128:
        await asyncio.sleep(0.005)
    refused = await server.http.post(CHAT, json=HELLO | {"n": 73})
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-requests"] == "72"
    assert (await server.http.post(CHAT, json=HELLO | {"n": 72})).status_code == 200
    go_on.set()
    assert (await asking).status_code == 200
    assert all_released(server)


@pytest.mark.parametrize("seed", range(3))
async def test_many_mixed_requests_never_exceed_the_queue_and_release_all_admission_slots(
    small: BatchServer, monkeypatch: pytest.MonkeyPatch, seed: int
):
    admission, submit, most = small.state.admission, FakeEngine.submit, 0

    def noting(engine: FakeEngine, *args: Any, **options: Any) -> Mailbox:
        nonlocal most
        mailbox = submit(engine, *args, **options)
        most = max(most, admission.used)
        return mailbox

    monkeypatch.setattr(FakeEngine, "submit", noting)
    small.engine.delay = 0.001
    draw = random.Random(seed)
    kinds = [*ROUTES, *WRONG.values()]
    kinds += [("/v1/embeddings", {"model": "fake", "input": ["a"] * 30})] * 6
    codes: list[int] = []

    async def ask() -> None:
        path, body = draw.choice(kinds)
        asking = asyncio.create_task(small.http.post(path, json=body))
        await asyncio.sleep(draw.random() * 0.02)
        if draw.random() < 0.3:
            asking.cancel()
        [answer] = await asyncio.gather(asking, return_exceptions=True)
        if not isinstance(answer, BaseException):
            codes.append(answer.status_code)

    async def caller() -> None:
        for _ in range(15):
            await ask()

    await asyncio.gather(*(caller() for _ in range(8)))
    await until_released(small)
    assert set(codes) == {200, 400, 429}
    assert 4 <= most <= 6


async def test_no_admission_slot_is_free_between_two_texts_of_one_request(
    small: BatchServer, monkeypatch: pytest.MonkeyPatch
):
    put, used = Mailbox.put, list[int]()

    def noting(mailbox: Mailbox, output: RequestOutput) -> None:
        put(mailbox, output)
        used.append(small.state.admission.used)

    monkeypatch.setattr(Mailbox, "put", noting)
    body = {"model": "fake", "input": ["a"] * 24}
    assert (await small.http.post("/v1/embeddings", json=body)).status_code == 200
    assert used[:18] == [6] * 18
    assert all_released(small)


async def test_a_request_of_the_whole_queues_size_is_admitted_with_several_api_processes(
    tmp_path: Path,
):
    async with batch_server(tmp_path, max_queue=4, api_workers=2) as server:
        for n, status, left in ((3, 200, "2"), (4, 200, "2"), (5, 400, "2")):
            answer = await server.http.post(CHAT, json=HELLO | {"n": n})
            assert answer.status_code == status, answer.text
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == left
        message = answer.json()["error"]["message"]
        assert "takes 4 at a time" in message and "--max-queue" in message


async def test_a_process_holds_its_share_of_the_queue_or_one_larger_request(tmp_path: Path):
    async with batch_server(tmp_path, max_queue=4, api_workers=2) as server:
        server.engine.held = True
        asking: list[asyncio.Task[httpx.Response]] = []
        for n, left in ((1, "1"), (1, "0")):
            asking.append(asyncio.create_task(server.http.post(CHAT, json=HELLO | {"n": n})))
            await until_submitted(server, len(asking))
            refused = await server.http.post(CHAT, json=HELLO | {"n": 3})
            assert refused.status_code == 429
            assert "limit of 2" in refused.json()["error"]["message"]
            assert refused.headers["x-ratelimit-remaining-requests"] == left
        server.engine.held = False
        await asyncio.gather(*asking)
        server.engine.held = True
        large = asyncio.create_task(server.http.post(CHAT, json=HELLO | {"n": 4}))
        await until_submitted(server, 4)
        refused = await server.http.post(CHAT, json=HELLO)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        server.engine.held = False
        assert (await large).status_code == 200
        assert all_released(server)
