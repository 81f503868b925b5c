"""Chat completions with `store`, kept among the responses and within the same limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar

import orjson
from pydantic import Field

from server.apis.openai.chat_schema import ChatRequest, Metadata
from server.apis.responses.database import NewResponseRow, ResponsesDatabase, Stored
from server.apis.responses.items import JsonItem
from server.apis.responses.store import ResponseStore
from server.errors import NotFound, Unavailable
from server.http.pagination import listed, page_of, unknown_place
from server.http.validation import Body

log = logging.getLogger("wavefill.responses")

Id = Annotated[str, Field(min_length=1, max_length=256)]


class MessagesQuery(Body):
    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "asc"


class ChatsQuery(MessagesQuery):
    metadata: Metadata | None = None  # as metadata[key]=value
    model: str | None = None


class ChatChange(Body):
    metadata: Metadata | None


MAX_PAGE_BYTES = 32 << 20  # a page with more ends early, but not before its first entry
REQUEST_FIELDS = {  # in a stored completion
    *("tools", "tool_choice", "response_format", "seed", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty"),
}
T = TypeVar("T")


class ChatStore:
    """The chat completions of one owner."""

    def __init__(self, store: ResponseStore, owner: bytes) -> None:
        self._store = store
        self._owner = f"chat:{owner.hex()}".encode()

    async def check(self) -> None:
        """Raises Unavailable if nothing can be kept now."""
        await self._store.call(lambda database: None)

    async def keep(self, completion: JsonItem, body: ChatRequest) -> None:
        """Keep a completion that has ended, and the request's messages.

        If that fails, its `store` is set to false and the reason logged.
        """

        def work(database: ResponsesDatabase) -> bool:
            id = completion["id"]
            fields = body.model_dump(include=REQUEST_FIELDS, by_alias=True)
            whole = completion | fields | {"input_user": body.user}
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

    async def _find(self, id: str, work: Callable[[ResponsesDatabase], T | None]) -> T:
        """What `work` returns.  Raises NotFound if that is None or False."""
        found = await self._store.call(work)
        if not found:
            raise NotFound(
                "Chat completion with id '{}' not found: it was not made with `store`, deleted, "
                "or not used for long.",
                id[:128],
                code="not_found",
            )
        return found

    async def get(self, id: str) -> Stored:
        """Raises NotFound."""
        return await self._find(id, lambda database: database.get(self._owner, id))

    async def delete(self, id: str) -> None:
        """Raises NotFound."""
        await self._find(id, lambda database: database.delete(self._owner, id))

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

        return await self._find(id, work)

    async def page(self, query: ChatsQuery) -> bytes:
        """The JSON of a list of completions.  Raises RequestError."""
        return await self._store.call(lambda database: _page(database, self._owner, query))

    async def messages(self, id: str, query: MessagesQuery) -> bytes:
        """The JSON of a list of the request's messages.  Raises NotFound, RequestError."""

        def work(database: ResponsesDatabase) -> bytes | None:
            stored = database.get(self._owner, id)
            if stored is None:
                return None
            page = page_of(orjson.loads(stored.input), query, f"message of '{id}'")
            return orjson.dumps(page)

        return await self._find(id, work)


def _messages(id: str, body: ChatRequest) -> list[JsonItem]:
    """The messages of a request, as they are listed."""
    entries: list[JsonItem] = []
    for index, message in enumerate(body.messages):
        fields = message.model_dump(exclude_none=True)
        parts = None if isinstance(message.content, str) else fields.get("content")
        content = message.content if parts is None else None
        entry = {"id": f"{id}-{index}", "name": None, "refusal": None}
        entries.append(entry | fields | {"content": content, "content_parts": parts})
    return entries


def _page(database: ResponsesDatabase, owner: bytes, query: ChatsQuery) -> bytes:
    later, direction = (">", "ASC") if query.order == "asc" else ("<", "DESC")
    select = "SELECT id, model, metadata FROM chats WHERE owner = ?"
    values: list[object] = [owner]
    if query.after is not None:
        start = database.connection.execute(
            "SELECT made, id FROM chats WHERE owner = ? AND id = ?", (owner, query.after)
        ).fetchone()
        if start is None:
            raise unknown_place(query.after, "stored chat completion")
        select += f" AND (made, id) {later} (?, ?)"
        values += start
    requested = (query.metadata or {}).items()
    found: dict[str, orjson.Fragment] = {}
    size = 0
    has_more = False
    rows = database.connection.execute(
        f"{select} ORDER BY made {direction}, id {direction}", values
    )
    for id, model, metadata in rows:
        if query.model not in (None, model) or not requested <= orjson.loads(metadata).items():
            continue
        has_more = len(found) == query.limit or size > MAX_PAGE_BYTES
        if has_more:
            break
        row = database.connection.execute(
            "SELECT response FROM responses WHERE id = ?", (id,)
        ).fetchone()
        if row is not None:  # another process may just have removed it
            found[id] = orjson.Fragment(row[0])
            size += len(row[0])
    rows.close()
    return orjson.dumps(listed(list(found.values()), list(found), has_more=has_more))
