"""Chat completions with `store`, kept among the responses and within the same limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Annotated, Literal

import orjson
from pydantic import Field

from server.apis.openai.chat_schema import ChatRequest, Metadata
from server.apis.responses.database import NewResponseRow, ResponsesDatabase, Stored
from server.apis.responses.items import JsonItem
from server.apis.responses.store import ResponseStore
from server.errors import NotFound, Unavailable
from server.http.pagination import listed, page_of, unknown_place
from server.http.validation import Body

Id = Annotated[str, Field(min_length=1, max_length=256)]


class ChatsQuery(Body):
    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)
    metadata: Metadata | None = None  # as metadata[key]=value
    model: str | None = None
    order: Literal["asc", "desc"] = "asc"


class MessagesQuery(Body):
    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "asc"


class ChatChange(Body):
    metadata: Metadata | None


log = logging.getLogger("wavefill.responses")

MAX_PAGE_BYTES = 32 << 20  # a page with more ends early, but not before its first entry
TOLD = {
    *("tools", "tool_choice", "response_format", "seed", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty"),
}


class ChatStore:
    """The chat completions of one owner."""

    def __init__(self, store: ResponseStore, owner: str) -> None:
        """`owner` as server.http.request_context.owner_of gives it."""
        self._store = store
        self._owner = f"chat:{owner}".encode()

    async def check(self) -> None:
        """Raises Unavailable if nothing can be kept now."""
        await self._store.call(lambda database: None)

    async def keep(self, completion: JsonItem, body: ChatRequest) -> None:
        """Keep a completion that has ended, and what it answers.

        If that fails, its `store` says so and the log why.
        """

        def work(database: ResponsesDatabase) -> bool:
            id = completion["id"]
            whole = completion | _request_fields(body)
            messages = _messages(id, body)
            metadata = orjson.dumps(completion["metadata"]).decode()
            entry = (id, self._owner, time.time(), completion["model"], metadata)

            def also() -> None:
                database.connection.execute("INSERT INTO chats VALUES (?, ?, ?, ?, ?)", entry)

            row = NewResponseRow(id, self._owner, orjson.dumps(messages), orjson.dumps(whole))
            return database.put(row, also)

        try:
            reason = "" if await self._store.call(work) else "it is too large"
        except Unavailable as error:
            reason = error.message
        if reason:
            log.error("chat completion %s is not stored: %s", completion["id"], reason)
            completion["store"] = False

    async def get(self, id: str) -> Stored:
        """Raises NotFound."""
        stored = await self._store.call(lambda database: database.get(self._owner, id))
        if stored is None:
            raise missing(id)
        return stored

    async def delete(self, id: str) -> None:
        """Raises NotFound."""
        if not await self._store.call(lambda database: database.delete(self._owner, id)):
            raise missing(id)

    async def describe(self, id: str, metadata: Mapping[str, str]) -> bytes:
        """Change a completion's metadata; its JSON.  Raises NotFound."""

        def work(database: ResponsesDatabase) -> bytes | None:
            connection = database.connection
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                row = connection.execute(
                    "SELECT response FROM responses WHERE id = ? AND owner = ?", (id, self._owner)
                ).fetchone()
                if row is None:
                    return None
                made = orjson.dumps(orjson.loads(row[0]) | {"metadata": metadata})
                connection.execute(
                    "UPDATE responses SET response = ?, bytes = bytes + ?, used = ? WHERE id = ?",
                    (made, len(made) - len(row[0]), time.time(), id),
                )
                connection.execute(
                    "UPDATE chats SET metadata = ? WHERE id = ?",
                    (orjson.dumps(metadata).decode(), id),
                )
            return made

        made = await self._store.call(work)
        if made is None:
            raise missing(id)
        return made

    async def page(self, query: ChatsQuery) -> bytes:
        """A list of those that the query asks for, as JSON.  Raises RequestError."""

        def work(database: ResponsesDatabase) -> bytes:
            return orjson.dumps(_page(database, self._owner, query))

        return await self._store.call(work)

    async def messages(self, id: str, query: MessagesQuery) -> bytes:
        """A list of what a completion answers, as JSON.  Raises NotFound, RequestError."""

        def work(database: ResponsesDatabase) -> bytes:
            stored = database.get(self._owner, id)
            if stored is None:
                raise missing(id)
            page = page_of(orjson.loads(stored.input), query, f"message of '{id}'")
            return orjson.dumps(page)

        return await self._store.call(work)


def _request_fields(body: ChatRequest) -> JsonItem:
    """What a stored completion tells of its request."""
    asked = body.model_dump(include=TOLD, by_alias=True)
    return asked | {"input_user": body.user}


def _messages(id: str, body: ChatRequest) -> list[JsonItem]:
    """The messages that a completion answers, as they are listed."""
    listed: list[JsonItem] = []
    for place, message in enumerate(body.messages):
        fields = message.model_dump(exclude_none=True)
        parts = None if isinstance(message.content, str) else fields.get("content")
        content = message.content if parts is None else None
        named = {"id": f"{id}-{place}", "name": None, "refusal": None}
        listed.append(named | fields | {"content": content, "content_parts": parts})
    return listed


def missing(id: str) -> NotFound:
    return NotFound(
        f"Chat completion with id '{id[:128]}' not found: it was not made with `store`, deleted, "
        "or not used for long.",
        code="not_found",
    )


def _page(database: ResponsesDatabase, owner: bytes, query: ChatsQuery) -> JsonItem:
    start: tuple[float, str] | None = None
    if query.after is not None:
        start = database.connection.execute(
            "SELECT made, id FROM chats WHERE owner = ? AND id = ?", (owner, query.after)
        ).fetchone()
        if start is None:
            raise unknown_place(query.after, "stored chat completion")
    found: list[orjson.Fragment] = []
    ids: list[str] = []
    size = 0
    for id in _matching(database, owner, query, start):
        if len(ids) == query.limit or size > MAX_PAGE_BYTES:
            return listed(found, ids, has_more=True)
        row = database.connection.execute(
            "SELECT response FROM responses WHERE id = ?", (id,)
        ).fetchone()
        if row is None:  # another process has just removed it
            continue
        found.append(orjson.Fragment(row[0]))
        ids.append(id)
        size += len(row[0])
    return listed(found, ids, has_more=False)


def _matching(
    database: ResponsesDatabase, owner: bytes, query: ChatsQuery, start: tuple[float, str] | None
) -> list[str]:
    """Ids behind `start`, one more than a page has."""
    later, direction = (">", "ASC") if query.order == "asc" else ("<", "DESC")
    text = "SELECT id, model, metadata FROM chats WHERE owner = ?"
    values: list[object] = [owner]
    if start is not None:
        text += f" AND (made, id) {later} (?, ?)"
        values += start
    wanted = (query.metadata or {}).items()
    found: list[str] = []
    rows = database.connection.execute(f"{text} ORDER BY made {direction}, id {direction}", values)
    for id, model, metadata in rows:
        if query.model not in (None, model) or (wanted and not wanted <= _items(metadata)):
            continue
        found.append(id)
        if len(found) > query.limit:
            break
    rows.close()
    return found


def _items(metadata: str) -> set[tuple[str, str]]:
    return set(orjson.loads(metadata).items())
