"""What a new response takes from those that are stored, and how one is stored."""

from __future__ import annotations

import logging

from server.apis.responses.database import (
    ChainBroken,
    ChainTooLong,
    NotFinished,
    Stored,
)
from server.apis.responses.items import JsonItem
from server.apis.responses.store import ResponseStore
from server.errors import NotFound, RequestError, Unavailable

log = logging.getLogger("wavefill.responses")


async def earlier_items(store: ResponseStore, owner: bytes, previous: str | None) -> list[JsonItem]:
    """The conversation up to and with the response `previous`.  Raises RequestError."""
    if previous is None:
        return []
    try:
        return await store.call(lambda database: database.history(owner, previous))
    except ChainBroken as broken:
        missing = str(broken)
        behind = "" if missing == previous else f", which '{previous}' continues,"
        raise RequestError(
            f"Previous response with id '{missing[:128]}'{behind} not found: it was not stored, "
            "deleted, or not used for long; send the conversation as `input`",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None
    except NotFinished as unfinished:
        raise RequestError(
            f"the previous response '{previous}' is {unfinished}: only one that is completed or "
            "incomplete can be continued",
            param="previous_response_id",
        ) from None
    except ChainTooLong:
        raise RequestError(
            f"the conversation that ends with '{previous}' is larger than this server puts "
            "together: send what matters of it as `input`",
            param="previous_response_id",
        ) from None


async def resolved(store: ResponseStore, owner: bytes, items: list[JsonItem]) -> list[JsonItem]:
    """The items with every item_reference replaced by what it names.  Raises RequestError."""
    wanted = {item["id"] for item in items if item["type"] == "item_reference"}
    if not wanted:
        return items
    try:
        found = await store.call(lambda database: database.items(owner, wanted))
    except ChainTooLong:
        raise RequestError(
            "the items that `input` refers to are in more responses than this server looks "
            "through: send the items themselves",
            param="input",
        ) from None
    for place, item in enumerate(items):
        if item["type"] == "item_reference" and item["id"] not in found:
            raise RequestError(
                f"Item with id '{item['id']}' not found: only items of stored responses can be "
                "referred to; send the item itself",
                param=f"input[{place}].id",
            )
    return [found[item["id"]] if item["type"] == "item_reference" else item for item in items]


async def keep(
    store: ResponseStore, owner: bytes, response: JsonItem, items: list[JsonItem]
) -> None:
    """Store a response that has ended; if that fails, its `store` says so and the log why."""
    try:
        kept = await store.call(lambda database: database.add(owner, response, items))
    except Unavailable as error:
        log.error("response %s is not stored: %s", response["id"], error.message)
        kept = False
    if not kept:
        response["store"] = False


async def find(store: ResponseStore, owner: bytes, id: str) -> Stored:
    """A stored response.  Raises NotFound for one that is not there, or not this owner's."""
    stored = await store.call(lambda database: database.get(owner, id))
    if stored is None:
        raise missing(id)
    return stored


def missing(id: str) -> NotFound:
    return NotFound(f"Response with id '{id[:128]}' not found.", code="not_found")
