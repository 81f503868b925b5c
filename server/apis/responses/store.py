"""Stored responses: the database in a thread of its own, and what requests look up in it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import orjson

from server.apis.responses.database import Limits, ResponsesDatabase, Stored
from server.apis.responses.items import JsonItem
from server.errors import FieldPath, NotFound, RequestError, Unavailable

log = logging.getLogger("wavefill.responses")

T = TypeVar("T")

IN_MEMORY = ":memory:"
OPENING_TRIES = 50
OPENING_SECONDS = 5.0
MAX_CHAIN = 4096  # responses of one conversation
MAX_CHAIN_BYTES = 32 << 20


class StoreUnusable(Exception):
    """The file cannot be used at all; the message names the remedy."""


class ResponseStore:
    """A database that one thread opens when it is first used.

    `path` is a file, or IN_MEMORY for one process alone.
    """

    def __init__(
        self, path: str = IN_MEMORY, limits: Limits | None = None, worker: int = 0, workers: int = 1
    ) -> None:
        """`worker` is this process's index among `workers` that share the file."""
        self.worker = worker
        self._workers = workers
        self._path = path
        self._limits = limits or Limits()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._database: ResponsesDatabase | None = None

    async def call(self, work: Callable[[ResponsesDatabase], T]) -> T:
        """Run `work` in the store's thread.  Raises Unavailable if the file fails."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: work(self._opened()))
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(
                "the store of responses does not work ({}): try again, or use `store` false",
                error,
                code="store_failed",
                retry_after_s=5,
            ) from error

    async def open(self) -> None:
        """Open it now.  Raises StoreUnusable."""
        try:
            await self.call(lambda database: None)
        except Unavailable as error:
            cause = error.__cause__
            reason = cause.strerror if isinstance(cause, OSError) else cause
            raise StoreUnusable(
                f"--response-store {self._path}: {reason}: choose a file that this user "
                "may write and that SQLite can read"
            ) from None

    def _connect(self) -> ResponsesDatabase:
        """Retry while another process that starts at the same time creates the file."""
        for _ in range(OPENING_TRIES):
            try:
                return ResponsesDatabase(self._path, self._limits)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                time.sleep(OPENING_SECONDS / OPENING_TRIES)
        return ResponsesDatabase(self._path, self._limits)

    def _opened(self) -> ResponsesDatabase:
        if self._database is None:
            database = self._connect()
            weakref.finalize(self, database.connection.close)
            database.fail_orphans(self.worker, self._workers)
            self._database = database
        return self._database


def history(database: ResponsesDatabase, owner: bytes, last: str) -> list[JsonItem]:
    """The items of the response `last` and of those before it, in order.  Raises RequestError."""
    chain: list[Stored] = []
    id: str | None = last
    size = 0
    while id is not None:
        stored = database.get(owner, id)
        if stored is None:
            behind = "" if id == last else f", which '{last}' continues,"
            raise RequestError(
                "Previous response with id '{}'{} not found: it was not stored, deleted, or not "
                "used for long; send the conversation as {input}",
                (id[:128], behind),
                param=FieldPath("previous_response_id"),
                code="previous_response_not_found",
            )
        if stored.status not in ("completed", "incomplete"):
            raise RequestError(
                "the previous response '{}' is {}: only one that is completed or incomplete can "
                "be continued",
                (last, stored.status),
                param=FieldPath("previous_response_id"),
            )
        chain.append(stored)
        size += len(stored.input) + len(stored.response)
        if len(chain) > MAX_CHAIN or size > MAX_CHAIN_BYTES:
            raise RequestError(
                "the conversation that ends with '{}' is larger than this server puts together: "
                "send what matters of it as {input}",
                last,
                param=FieldPath("previous_response_id"),
            )
        id = stored.previous
    return [item for row in reversed(chain) for item in _items_of(row.input, row.response)]


def find_items(database: ResponsesDatabase, owner: bytes, ids: set[str]) -> dict[str, JsonItem]:
    """Those of the items that are in any of the owner's responses.

    Raises RequestError if they are in more than MAX_CHAIN_BYTES of them.
    """
    found: dict[str, JsonItem] = {}
    size = 0
    for id in ids:
        if id in found:
            continue
        row = database.connection.execute(
            "SELECT r.input, r.response FROM items i JOIN responses r ON r.id = i.response "
            "WHERE i.id = ? AND r.owner = ? LIMIT 1",
            (id, owner),
        ).fetchone()
        if row is None:
            continue
        size += len(row[0]) + len(row[1])
        if size > MAX_CHAIN_BYTES:
            raise RequestError(
                "the items that {input} refers to are in more responses than this server looks "
                "through: send the items themselves"
            )
        found |= {item["id"]: item for item in _items_of(*row) if item["id"] in ids}
    return found


def _items_of(input: bytes, response: bytes) -> list[JsonItem]:
    return [*orjson.loads(input), *orjson.loads(response)["output"]]


async def resolved(store: ResponseStore, owner: bytes, items: list[JsonItem]) -> list[JsonItem]:
    """The items, with every item_reference replaced by its item.  Raises RequestError."""
    ids = {item["id"] for item in items if item["type"] == "item_reference"}
    if not ids:
        return items
    found = await store.call(lambda database: find_items(database, owner, ids))
    for index, item in enumerate(items):
        if item["type"] == "item_reference" and item["id"] not in found:
            raise RequestError(
                "Item with id '{}' not found: only items of stored responses can be referred to; "
                "send the item itself",
                item["id"],
                param=FieldPath("input", index, "id"),
            )
    return [found[item["id"]] if item["type"] == "item_reference" else item for item in items]


async def keep(
    store: ResponseStore, owner: bytes, response: JsonItem, items: list[JsonItem]
) -> None:
    """Store a response that has ended; its `store` becomes False if that fails."""
    try:
        response["store"] = await store.call(lambda database: database.add(owner, response, items))
    except Unavailable as error:
        log.error("response %s is not stored: %s", response["id"], error.message)
        response["store"] = False


def find(database: ResponsesDatabase, owner: bytes, id: str) -> Stored:
    """A response of this owner.  Raises NotFound."""
    stored = database.get(owner, id)
    if stored is None:
        raise missing(id)
    return stored


def missing(id: str) -> NotFound:
    return NotFound("Response with id '{}' not found.", id[:128], code="not_found")
