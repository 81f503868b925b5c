"""The application with a data directory and a scripted engine, in the event loop of a test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx

from server.app import create_app, line_app
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore
from server.loaded_model import LoadedModel
from server.metrics.metrics import Metrics
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState
from tests.support.server.fake_engine import GREETING, FakeEngine, fake_config, write_tokenizer

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class FakeClock:
    """Unix seconds that stand still until a test advances them."""

    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class BatchServer:
    engine: FakeEngine
    store: BatchStore
    state: ServerState
    http: httpx.AsyncClient
    clock: FakeClock
    runners: list[asyncio.Task[None]] = field(default_factory=list)

    def run_batches(self) -> BatchRunner:
        """From now on batches run."""
        app, config = line_app(self.state), self.state.config
        client: Any = self.engine
        runner = BatchRunner(self.store, app, client, config, self.state.metrics, poll_seconds=0.01)
        self.runners.append(asyncio.create_task(runner.run()))
        return runner

    async def stop(self) -> None:
        for task in self.runners:
            task.cancel()
        await asyncio.gather(*self.runners, return_exceptions=True)
        self.runners.clear()

    async def upload(self, content: bytes | str, purpose: str = "batch", **options: Any) -> str:
        """The id of a new file."""
        files = {"file": ("in.jsonl", content)}
        answer = await self.http.post(
            "/v1/files", data={"purpose": purpose}, files=files, **options
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def create(self, content: bytes | str, endpoint: str = CHAT, **fields: Any) -> Any:
        """A new batch of these lines."""
        body = {
            "input_file_id": await self.upload(content),
            "endpoint": endpoint,
            "completion_window": "24h",
        }
        answer = await self.http.post("/v1/batches", json=body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def batch(self, id: str) -> Any:
        return (await self.http.get(f"/v1/batches/{id}")).json()

    async def until(self, id: str, condition: Callable[[Any], bool] | None = None) -> Any:
        """The batch when it has ended, or when it is as the condition wants it."""
        deadline = time.monotonic() + 20
        while True:
            batch = await self.batch(id)
            if condition(batch) if condition else batch["status"] in ENDED:
                return batch
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.01)

    async def records(self, file_id: str | None) -> list[Any]:
        """The lines of an output or error file."""
        if file_id is None:
            return []
        answer = await self.http.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


def line(custom_id: str, url: str = CHAT, **fields: Any) -> str:
    """A line of an input file; its body is a short question unless `fields` say otherwise."""
    body = {"model": "fake", "messages": [{"role": "user", "content": custom_id}]}
    whole = {"custom_id": custom_id, "method": "POST", "url": url, "body": body | fields}
    return json.dumps(whole) + "\n"


@cache
def fake_tokenizer() -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return ChatTokenizer.load(write_tokenizer(Path(folder)))


@contextlib.asynccontextmanager
async def batch_server(
    folder: Path, *, key: str = "", clock: FakeClock | None = None, **config: Any
) -> AsyncIterator[BatchServer]:
    """A server that keeps its files in `folder`; batches wait for run_batches()."""
    tokenizer = fake_tokenizer()
    tokens = [*tokenizer.encode(GREETING), 0]
    engine = FakeEngine(reply=lambda request: tokens)
    settings = fake_config(data_dir=str(folder / "data"), **config)
    clock = clock or FakeClock()
    store = BatchStore(Path(settings.data_dir), max_bytes=settings.max_data_bytes, clock=clock)
    client: Any = engine
    state = ServerState(settings, client, LoadedModel(tokenizer), Metrics(), batches=store)
    transport = httpx.ASGITransport(create_app(state))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as http:
        server = BatchServer(engine, store, state, http, clock)
        try:
            yield server
        finally:
            await server.stop()
            store.close()
            state.grammars.close()
