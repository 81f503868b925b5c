"""The requests that GET /v1/requests/{id} tells of: how long each phase took.

The log holds numbers only, no text and no token, of the last N requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runtime.ipc.client import Mailbox
from server.generation.choice_stats import ChoiceStats
from server.http.request_context import KEY_NAME, OWNER, REQUEST_ID, exchange


class LoggedChoice(Protocol):
    """What the log reads of a choice (choice.py)."""

    @property
    def finish(self) -> str | None: ...
    @property
    def stats(self) -> ChoiceStats: ...
    @property
    def mailbox(self) -> Mailbox: ...


@dataclass(eq=False)
class Record:
    """One request: a snapshot is taken while it runs, its final state is stored at its end."""

    name: str  # the answer's id without its prefix
    request_id: str
    owner: bytes
    facts: dict[str, object]  # what does not change
    snapshot: Callable[[], dict[str, object]] | None  # until it ends
    key: str  # the name of the caller's API key; "" without keys
    choices: Sequence[LoggedChoice]  # until it ends; none of an embedding
    on_end: Callable[[Record], None]
    arrived: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    final: dict[str, object] = field(default_factory=dict[str, object])
    stats: ChoiceStats | None = None  # of its first choice, from its end on
    generated: int = 0  # tokens of all choices, at its end

    def end(self) -> None:
        """Store the final state and release everything else."""
        if self.snapshot is None:
            return
        self.final, self.snapshot = self.snapshot(), None
        self.ended = time.monotonic()
        if self.choices:
            self.stats = self.choices[0].stats
            self.generated = sum(choice.stats.generated for choice in self.choices)
        self.choices = ()
        self.on_end(self)

    def to_json(self) -> dict[str, object]:
        return self.facts | (self.final if self.snapshot is None else self.snapshot())


@dataclass
class KeyTotals:
    """What the ended requests of one API key come to."""

    requests: int = 0
    generated: int = 0


class RequestLog:
    """The last `limit` requests of this process, and those that are open."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self._records: deque[Record] = deque()
        self._by_id: dict[tuple[bytes, str], Record] = {}
        self.open: dict[str, Record] = {}  # by name
        self.totals: dict[str, KeyTotals] = {}  # by the key's name

    def newest(self) -> Iterator[Record]:
        """The last requests, the newest one first."""
        return reversed(self._records)

    def begin(
        self,
        name: str,
        facts: dict[str, object],
        snapshot: Callable[[], dict[str, object]],
        choices: Sequence[LoggedChoice] = (),
    ) -> Record:
        """Add a request.

        name      unique; the end of its answer's id
        snapshot  returns its state while it runs
        """
        scope = exchange.get({})
        request_id, owner = scope.get(REQUEST_ID, ""), scope.get(OWNER, b"")
        facts = {"id": name, "object": "request", "request_id": request_id} | facts
        facts["created"] = round(time.time(), 3)
        key = scope.get(KEY_NAME, "")
        record = Record(name, request_id, owner, facts, snapshot, key, choices, self._ended)
        self.open[name] = record
        if self.limit < 1:
            return record
        if len(self._records) >= self.limit:
            self._forget(self._records.popleft())
        self._records.append(record)
        for id in (name, request_id):
            self._by_id[owner, id] = record
        return record

    def _ended(self, record: Record) -> None:
        del self.open[record.name]
        totals = self.totals.setdefault(record.key, KeyTotals())
        totals.requests += 1
        totals.generated += record.generated

    def _forget(self, record: Record) -> None:
        for id in (record.name, record.request_id):
            if self._by_id.get((record.owner, id)) is record:
                del self._by_id[record.owner, id]

    def find(self, id: str, owner: bytes) -> dict[str, object] | None:
        """A request of this owner, by X-Request-Id or by its answer's id."""
        name = id.replace("_", "-").rpartition("-")[2]
        record = self._by_id.get((owner, id)) or self._by_id.get((owner, name))
        return None if record is None or not id else record.to_json()
