"""The requests that GET /v1/requests/{id} tells of: how long each phase took.

The log holds numbers only, no text and no token, of the last N requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from server.http.request_context import OWNER, REQUEST_ID, exchange


@dataclass
class Record:
    """One request: a snapshot is taken while it runs, its final state is stored at its end."""

    name: str  # the answer's id without its prefix
    request_id: str
    owner: bytes
    facts: dict[str, object]  # what does not change
    snapshot: Callable[[], dict[str, object]] | None  # until it ends
    final: dict[str, object] = field(default_factory=dict[str, object])

    def end(self) -> None:
        """Store the final state and release everything else."""
        if self.snapshot is not None:
            self.final, self.snapshot = self.snapshot(), None

    def to_json(self) -> dict[str, object]:
        return self.facts | (self.final if self.snapshot is None else self.snapshot())


class RequestLog:
    """The last `limit` requests of this process."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self._records: deque[Record] = deque()
        self._by_id: dict[tuple[bytes, str], Record] = {}

    def begin(
        self, name: str, facts: dict[str, object], snapshot: Callable[[], dict[str, object]]
    ) -> Record:
        """Add a request.

        name      unique; the end of its answer's id
        snapshot  returns its state while it runs
        """
        scope = exchange.get({})
        request_id, owner = scope.get(REQUEST_ID, ""), scope.get(OWNER, b"")
        facts = {"id": name, "object": "request", "request_id": request_id} | facts
        facts["created"] = round(time.time(), 3)
        record = Record(name, request_id, owner, facts, snapshot)
        if self.limit < 1:
            return record
        if len(self._records) >= self.limit:
            self._forget(self._records.popleft())
        self._records.append(record)
        for id in (name, request_id):
            self._by_id[owner, id] = record
        return record

    def _forget(self, record: Record) -> None:
        for id in (record.name, record.request_id):
            if self._by_id.get((record.owner, id)) is record:
                del self._by_id[record.owner, id]

    def find(self, id: str, owner: bytes) -> dict[str, object] | None:
        """A request of this owner, by X-Request-Id or by its answer's id."""
        name = id.replace("_", "-").rpartition("-")[2]
        record = self._by_id.get((owner, id)) or self._by_id.get((owner, name))
        return None if record is None or not id else record.to_json()
