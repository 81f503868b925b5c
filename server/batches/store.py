"""Batches and their states.

validating ---> in_progress ---> finalizing ---> completed | expired
   |  |             |
   |  `-------------+--> cancelling ---> cancelled
   `--> failed
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from server.batches.database import IS_OPEN, BatchDatabase, number_of
from server.batches.files import KEEP_SECONDS, FileStore
from server.batches.schema import BatchObject, BatchQuery, BatchRequest, StoredBatch
from server.errors import FieldPath, NotFound, RequestError
from server.generation.admission import full

WINDOW_SECONDS = 86400
MAX_BATCHES = 10_000  # stored; those that ended are deleted, the oldest first
MAX_OPEN = 1000  # that have not ended


class BatchStore:
    """Batches and files of a data directory.  Every method blocks."""

    def __init__(
        self, directory: Path, *, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens the directory, which is made if there is none.  Raises DataError."""
        self.database = BatchDatabase(directory)
        self.files = FileStore(self.database, max_bytes=max_bytes, clock=clock)
        self.clock = clock

    def close(self) -> None:
        self.database.close()

    def create(self, owner: bytes, body: BatchRequest) -> BatchObject:
        """Raises RequestError if the input file does not exist or is not meant for batches."""
        file = self.files.find(owner, body.input_file_id, FieldPath("input_file_id"))
        if file.purpose != "batch":
            raise RequestError(
                "the file `{}` was uploaded with the purpose {!r}: upload it with the purpose "
                "'batch'",
                (file.id, file.purpose),
                param=FieldPath("input_file_id"),
                code="invalid_purpose",
            )
        now = int(self.clock())
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex[:24]}",
            endpoint=body.endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=body.metadata,
        )
        keep = body.output_expires_after
        with self.database.transaction() as connection:
            self._make_room(connection)
            connection.execute(
                "INSERT INTO batches"
                " (id, owner, status, input_id, output_id, error_id, keep_seconds, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    batch.id,
                    owner.hex(),
                    batch.status,
                    file.id,
                    self.files.insert(connection, owner, "reserved"),
                    self.files.insert(connection, owner, "reserved"),
                    KEEP_SECONDS if keep is None else keep.seconds,
                    msgspec.json.encode(batch),
                ),
            )
        return batch

    def _make_room(self, connection: sqlite3.Connection) -> None:
        count, num_open = connection.execute(
            f"SELECT COUNT(*), COALESCE(SUM({IS_OPEN}), 0) FROM batches"
        ).fetchone()
        if num_open >= MAX_OPEN:
            raise full(
                "batches_full",
                "{} batches have not ended, at most {} may wait: try again later",
                (num_open, MAX_OPEN),
            )
        connection.execute(
            "DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE NOT "
            f"({IS_OPEN}) ORDER BY number LIMIT ?)",
            (max(0, count + 1 - MAX_BATCHES),),
        )

    def find(self, owner: bytes, id: str) -> BatchObject:
        """Raises NotFound, also for batches of other owners."""
        with self.database.reading() as connection:
            row = connection.execute(
                "SELECT body FROM batches WHERE owner = ? AND id = ?", (owner.hex(), id)
            ).fetchone()
        if row is None:
            raise NotFound(
                "no batch `{}` is here: GET /v1/batches lists those that are",
                id[:64],
                code="batch_not_found",
            )
        return _batch(row)

    def page(self, owner: bytes, query: BatchQuery) -> tuple[list[BatchObject], bool]:
        """A page of batches, the newest first, and whether there are more.  Raises RequestError."""
        with self.database.reading() as connection:
            after = query.after
            number = number_of(connection, "batches", owner, after) if after else 2**62
            rows = connection.execute(
                "SELECT body FROM batches WHERE owner = ? AND number < ?"
                " ORDER BY number DESC LIMIT ?",
                (owner.hex(), number, query.limit + 1),
            ).fetchall()
        return [_batch(row) for row in rows[: query.limit]], len(rows) > query.limit

    def cancel(self, owner: bytes, id: str) -> BatchObject:
        """Cancel a batch.  Raises NotFound, or RequestError if it has ended."""
        self.find(owner, id)

        def change(batch: BatchObject) -> BatchObject:
            if batch.status in ("cancelling", "cancelled"):
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise RequestError(
                    "the batch `{}` is {}: only one that is validating or in progress can be "
                    "cancelled",
                    (id, batch.status),
                    code="batch_not_cancellable",
                )
            return replace(batch, status="cancelling", cancelling_at=int(self.clock()))

        return self.change(id, change)

    # For the process that runs them.

    def open_batches(self) -> list[StoredBatch]:
        """Those that have not ended, the oldest first."""
        with self.database.reading() as connection:
            rows = connection.execute(
                "SELECT body, owner, output_id, error_id, keep_seconds FROM batches"
                f" WHERE {IS_OPEN} ORDER BY number"
            ).fetchall()
        return [StoredBatch(_batch(row), bytes.fromhex(row[1]), *row[2:]) for row in rows]

    def change(self, id: str, change: Callable[[BatchObject], BatchObject]) -> BatchObject:
        """Replace a batch by `change(batch)`, in one transaction."""
        with self.database.transaction() as connection:
            return self._change(connection, id, change)

    def _change(
        self, connection: sqlite3.Connection, id: str, change: Callable[[BatchObject], BatchObject]
    ) -> BatchObject:
        row = connection.execute("SELECT body FROM batches WHERE id = ?", (id,)).fetchone()
        batch = change(_batch(row))
        connection.execute(
            "UPDATE batches SET status = ?, body = ? WHERE id = ?",
            (batch.status, msgspec.json.encode(batch), id),
        )
        return batch

    def note_sizes(self, sizes: dict[str, int]) -> None:
        """Update the sizes of files that are being written, which count against the limit."""
        with self.database.transaction() as connection:
            rows = [(num_bytes, id) for id, num_bytes in sizes.items()]
            connection.executemany("UPDATE files SET bytes = ? WHERE id = ?", rows)

    def end(
        self,
        stored: StoredBatch,
        sizes: dict[str, int],
        change: Callable[[BatchObject], BatchObject],
    ) -> BatchObject:
        """Store the final state of a batch and make its files visible, except empty ones."""
        names = {stored.output_id: "output", stored.error_id: "error"}
        empty = [id for id in names if not sizes.get(id)]

        def ended(batch: BatchObject) -> BatchObject:
            output_id, error_id = [None if id in empty else id for id in names]
            return replace(change(batch), output_file_id=output_id, error_file_id=error_id)

        with self.database.transaction() as connection:
            for id, name in names.items():
                if id in empty:
                    connection.execute("UPDATE files SET state = 'deleting' WHERE id = ?", (id,))
                    continue
                self.files.finish(
                    connection,
                    id,
                    filename=f"{stored.batch.id}_{name}.jsonl",
                    purpose="batch_output",
                    num_bytes=sizes[id],
                    keep_seconds=stored.keep_seconds,
                )
            connection.execute("DELETE FROM failures WHERE batch = ?", (stored.batch.id,))
            batch = self._change(connection, stored.batch.id, ended)
        for id in empty:
            self.files.remove(id)
        return batch

    def failures(self, id: str) -> dict[int, int]:
        """The number of engine failures by line."""
        with self.database.reading() as connection:
            rows = connection.execute(
                "SELECT line, count FROM failures WHERE batch = ?", (id,)
            ).fetchall()
        return {row["line"]: row["count"] for row in rows}

    def note_failure(self, id: str, line: int) -> int:
        """Count a failure of a line; returns how many there were."""
        with self.database.transaction() as connection:
            return connection.execute(
                "INSERT INTO failures VALUES (?, ?, 1) ON CONFLICT (batch, line)"
                " DO UPDATE SET count = count + 1 RETURNING count",
                (id, line),
            ).fetchone()[0]


def _batch(row: sqlite3.Row) -> BatchObject:
    return msgspec.json.decode(row["body"], type=BatchObject)
