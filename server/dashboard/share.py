"""Share: what one API process knows of its own requests, for the dashboard of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

import msgspec
from msgspec import Struct

from runtime.snapshot import SequenceEvent
from server.generation.request_log import KeyTotals, Record, RequestLog
from server.metrics.metrics import Metrics

MAX_ROWS = 60  # requests that are listed, of one process

Counts = dict[int, int]  # of a LatencyWindow


class RequestRow(Struct, frozen=True):
    """A request; times are monotonic seconds, 0 for what has not happened."""

    id: str
    key: str
    route: str
    model: str
    state: str
    batch: bool  # a line of a batch
    created: float  # Unix seconds
    sequence: int  # the id of its first choice in the engine; 0 if it has none
    choices: int
    arrived: float
    started: float
    first_token: float
    ended: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    events: list[SequenceEvent]  # of the first choice, once it has ended


class KeyRow(Struct):
    """The requests of one API key."""

    running: int = 0  # sequences
    waiting: int = 0
    requests: int = 0  # that have ended
    generated: int = 0  # tokens, since the server started

    def add(self, other: KeyRow) -> None:
        self.running += other.running
        self.waiting += other.waiting
        self.requests += other.requests
        self.generated += other.generated


class Share(Struct, frozen=True):
    requests: list[RequestRow]  # the newest first
    open: int  # requests, listed or not
    keys: dict[str, KeyRow]
    first_token: Counts
    inter_token: Counts

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decoded(data: bytes) -> Share:
        return msgspec.msgpack.decode(data, type=Share)


def share_of(requests: RequestLog, batch_requests: RequestLog, metrics: Metrics) -> Share:
    """The share of this process now."""
    logs = ((requests, False), (batch_requests, True))
    rows = [_row(record, batch) for log, batch in logs for record in islice(log.newest(), MAX_ROWS)]
    rows.sort(key=lambda row: -row.created)
    keys: dict[str, KeyRow] = {}
    for log, _ in logs:
        for name, found in _keys(log):
            keys.setdefault(name, KeyRow()).add(found)
    metrics.keep_recent()
    return Share(
        rows[:MAX_ROWS],
        len(requests.open) + len(batch_requests.open),
        keys,
        metrics.recent_first_token.counts(),
        metrics.recent_inter_token.counts(),
    )


def merged(shares: Iterable[Share]) -> Share:
    """The shares of several processes as one."""
    requests: list[RequestRow] = []
    num_open = 0
    keys: dict[str, KeyRow] = {}
    first_token: Counts = {}
    inter_token: Counts = {}
    for share in shares:
        requests += share.requests
        num_open += share.open
        for name, row in share.keys.items():
            keys.setdefault(name, KeyRow()).add(row)
        for total, counts in (
            (first_token, share.first_token),
            (inter_token, share.inter_token),
        ):
            for bucket, count in counts.items():
                total[bucket] = total.get(bucket, 0) + count
    requests.sort(key=lambda row: -row.created)
    return Share(requests[:MAX_ROWS], num_open, keys, first_token, inter_token)


def _keys(log: RequestLog) -> Iterator[tuple[str, KeyRow]]:
    for name, totals in log.totals.items():
        yield name, _ended(totals)
    for record in log.open.values():
        row = KeyRow()
        for choice in record.choices:
            row.generated += choice.stats.generated
            if choice.finish is None:
                row.running += choice.stats.started > 0
                row.waiting += choice.stats.started == 0
        row.running += not record.choices  # an embedding
        yield record.key, row


def _ended(totals: KeyTotals) -> KeyRow:
    return KeyRow(requests=totals.requests, generated=totals.generated)


def _row(record: Record, batch: bool) -> RequestRow:
    found = cast("dict[str, Any]", record.to_json())
    stats = record.choices[0].stats if record.choices else record.stats
    usage: dict[str, Any] = found["usage"]
    cached: dict[str, int] = usage.get("prompt_tokens_details", {})
    return RequestRow(
        id=record.name,
        key=record.key,
        route=found["route"],
        model=found["model"],
        state=found["state"],
        batch=batch,
        created=found["created"],
        sequence=record.choices[0].mailbox.id if record.choices else 0,
        choices=found.get("num_choices", 1),
        arrived=stats.arrived if stats else record.arrived,
        started=stats.started if stats else 0.0,
        first_token=stats.first_token if stats else 0.0,
        ended=(stats.ended if stats else 0.0) or record.ended,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached.get("cached_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        preemptions=stats.preemptions if stats else 0,
        events=stats.events if stats else [],
    )
