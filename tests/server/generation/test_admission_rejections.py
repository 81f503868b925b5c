"""Each reason for a 429 is counted, and has the seconds after which to try again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from server.batches import store as batch_store
from server.constrained import grammar_client
from server.generation.admission import RETRY_AFTER_S, Reason
from server.http import middleware
from server.http.connection import CONNECTIONS_FULL
from server.images.addresses import AllowedHosts
from server.images.decoder import ImageDecoder
from server.images.fetch import ImageFetcher
from server.images.limits import ImageLimits
from server.images.reader import ImageReader
from tests.support.paths import ROOT
from tests.support.server.batch_server import CHAT, BatchServer, line
from tests.support.server.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hello"}]
HELLO: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}
LOOK = {"messages": [{"role": "user", "content": [IMAGE]}]}


async def count_of(server: BatchServer) -> dict[str, float]:
    """The refused requests, by reason."""
    text = (await server.http.get("/metrics")).text
    rows = [row for row in text.splitlines() if row.startswith("wavefill_admission_rejections_t")]
    return {row.split('reason="')[1].split('"')[0]: float(row.split()[-1]) for row in rows}


def full_queue(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeEngine, "pending", property(lambda engine: 200))


def full_bodies(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(middleware, "MAX_BODIES", 0)


def full_connections(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    transport: Any = server.http._transport  # type: ignore[attr-defined]
    app = transport.app

    async def crowded(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, CONNECTIONS_FULL: 1}, receive, send)

    patch.setattr(transport, "app", crowded)


def full_grammars(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grammar_client, "MAX_WAITING", 0)


def full_images(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    limits, fetcher = ImageLimits(token="<|end|>"), ImageFetcher(AllowedHosts())
    reader = ImageReader(limits, fetcher, ImageDecoder(max_waiting=0))
    patch.setattr(server.state.model, "images", reader)
    assert server.engine.ready is not None
    server.engine.ready = replace(server.engine.ready, reads_images=True)


def full_files(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server.store.files, "_max_files", 1)


def full_data(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server.store.files, "max_bytes", 1)


def full_batches(server: BatchServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_store, "MAX_OPEN", 0)


FULL: dict[str, tuple[Callable[[BatchServer, pytest.MonkeyPatch], None], str]] = {
    "queue_full": (full_queue, CHAT),
    "bodies_full": (full_bodies, CHAT),
    "connections_full": (full_connections, CHAT),
    "grammars_full": (full_grammars, CHAT),
    "images_full": (full_images, CHAT),
    "files_full": (full_files, "/v1/files"),
    "data_full": (full_data, "/v1/files"),
    "batches_full": (full_batches, "/v1/batches"),
}


OPTIONS = {
    "queue_full": "--max-queue",
    "bodies_full": "--max-body-bytes",
    "data_full": "--max-data-bytes",
}


@pytest.mark.parametrize("reason", get_args(Reason))
async def test_each_reason_for_a_429_is_counted_and_has_its_retry_after(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch, reason: Reason
):
    fill, path = FULL[reason]
    file_id = await server.upload(line("a"))
    fill(server, monkeypatch)
    if path == "/v1/files":
        form = {"files": {"file": ("in.jsonl", line("a"))}, "data": {"purpose": "batch"}}
        answer = await server.http.post(path, **form)  # type: ignore[arg-type]
    else:
        batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        chat = HELLO | (LOOK if reason == "images_full" else FORM)
        answer = await server.http.post(path, json=chat if path == CHAT else batch)
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert OPTIONS.get(reason, "") in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == str(RETRY_AFTER_S[reason])
    assert await count_of(server) == {name: float(name == reason) for name in get_args(Reason)}


def test_every_429_has_its_reason_in_one_table():
    root = ROOT / "server"
    made = {
        path.name
        for path in root.rglob("*.py")
        if "RateLimited(" in path.read_text().replace("class RateLimited(", "")
    }
    assert made == {"admission.py"}
    documented = (ROOT / "docs" / "operate.md").read_text("utf-8")
    assert all(f"`{reason}`" in documented for reason in get_args(Reason))
