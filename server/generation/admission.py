"""Admission control: admission slots for sequences, and every reason for a 429.

A request reserves its slots before its prompts are rendered, so that a full server refuses without
doing that work.  A reserved slot becomes a pending request of the engine client when its sequence
is submitted: the sum of the two is limited.

Each API process has its share of --max-queue, because it does not know what the others have
admitted.  A request for more than the share is admitted when its process has no other, so that
whatever fits --max-queue can be answered: a process holds at most its share, or one such request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, LiteralString

from server.engine import Engine
from server.errors import RateLimited, RequestError

Reason = Literal[
    "queue_full",  # sequences that run or wait: --max-queue
    "bodies_full",  # bytes that the bodies of open requests hold
    "connections_full",  # connections with a request in flight: the limit of open files
    "grammars_full",  # grammars that wait to be checked
    "images_full",  # images that wait to be decoded, or the bytes of those that are
    "files_full",  # files that are stored
    "data_full",  # bytes that they have: --max-data-bytes
    "batches_full",  # batches that have not ended
]
# Seconds until there may be room; files need a client to delete some.
RETRY_AFTER_S: Mapping[Reason, int] = {
    "queue_full": 1,
    "bodies_full": 1,
    "connections_full": 1,
    "grammars_full": 1,
    "images_full": 1,
    "files_full": 60,
    "data_full": 60,
    "batches_full": 60,
}


def full(reason: Reason, template: LiteralString, values: object) -> RateLimited:
    """The 429 to raise; the middleware counts it when it answers."""
    error = RateLimited(template, values, retry_after_s=RETRY_AFTER_S[reason])
    error.reason = reason
    return error


class Admission:
    """The slots of one API process.  Lives on its event loop."""

    def __init__(self, client: Engine, *, limit: int, share: int, bounded: bool = True) -> None:
        """limit: sequences of one request; share: of all requests, unless `bounded` is False."""
        self._client = client
        self._limit = limit
        self.share = share
        self._bounded = bounded
        self.reserved = 0  # slots whose sequences are not submitted yet

    @property
    def used(self) -> int:
        """Sequences that run, wait or are about to be submitted."""
        return self._client.pending + self.reserved

    @property
    def available(self) -> int:
        """How many more sequences could be admitted now."""
        return max(0, self.share - self.used)

    def reserve(self, requested: int) -> AdmissionSlots:
        """Slots for `requested` sequences of one request; the caller must close them.

        Raises RequestError if there are never so many, RateLimited if there are not now.
        """
        if requested > self._limit:
            raise RequestError(
                "prompts times {n} (or {best_of}) is {} sequences, this server takes {} at a "
                "time: send fewer prompts or lower {n} (the operator can raise --max-queue)",
                (requested, self._limit),
            )
        if self._bounded and self.used and requested > self.available:
            template = (
                "{} sequences are running or waiting, {} more exceed the limit of {}: try again "
                "later"
            )
            if requested > self.share:
                template += ", send fewer prompts or lower `n`"
            template += " (the operator can raise --max-queue)"
            raise full("queue_full", template, (self.used, requested, self.share))
        return AdmissionSlots(self, requested)


class AdmissionSlots:
    """Slots that one request holds for sequences which it has not submitted yet."""

    def __init__(self, admission: Admission, held: int) -> None:
        self._admission = admission
        self.held = 0
        self.take(held)

    def take(self, count: int = 1) -> None:
        """Hold the slot of a sequence that has just ended, for the next one."""
        self.held += count
        self._admission.reserved += count

    def give_back(self, count: int = 1) -> None:
        """Release slots: their sequences are submitted right after, or there will be none."""
        assert count <= self.held, "more sequences than slots were reserved"
        self.held -= count
        self._admission.reserved -= count

    def close(self) -> None:
        """Give back all that are still held."""
        self.give_back(self.held)

    def __enter__(self) -> AdmissionSlots:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
