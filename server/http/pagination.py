"""OpenAI's lists that are read in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from server.errors import RequestError


class PageQuery(Protocol):
    """What the query of a list says of its page."""

    @property
    def after(self) -> str | None: ...
    @property
    def limit(self) -> int: ...
    @property
    def order(self) -> Literal["asc", "desc"]: ...


def listed(entries: Sequence[object], ids: Sequence[object], *, has_more: bool) -> dict[str, Any]:
    """A page of a list; `ids` are those of its entries."""
    return {
        "object": "list",
        "data": entries,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


def page_of(entries: list[dict[str, Any]], query: PageQuery, what: str) -> dict[str, Any]:
    """The page that a query asks for, of all entries in ascending order.

    what   an `after` that is not among them is no ...
    Raises RequestError for one.
    """
    if query.order == "desc":
        entries = entries[::-1]
    ids = [entry["id"] for entry in entries]
    start = 0
    if query.after is not None:
        if query.after not in ids:
            raise unknown_place(query.after, what)
        start = ids.index(query.after) + 1
    end = start + query.limit
    return listed(entries[start:end], ids[start:end], has_more=end < len(ids))


def unknown_place(after: str, what: str) -> RequestError:
    return RequestError(
        "{after} is {}, which is no {}: use the `last_id` of an earlier page", (after, what)
    )
