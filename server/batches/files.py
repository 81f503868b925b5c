"""Uploaded and written files.

A file's row is inserted before its first byte is written and deleted after the file is removed, so
that every file on disk has an owner.

    uploading  bytes are arriving; `bytes` is what was reserved for them
    reserved   a batch writes it
    processed  complete: the only state that clients see
    deleting   about to be removed
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from server.batches.database import IS_OPEN, BatchDatabase, number_of
from server.batches.schema import FileQuery
from server.errors import FieldPath, NotFound, RequestError
from server.generation.admission import full

MAX_FILES = 10_000  # in the directory, reserved ones too
UPLOAD_SECONDS = 3600  # older ones belong to a process that died
KEEP_SECONDS = 30 * 86400  # default for inputs and outputs of batches
VISIBLE = "state = 'processed' AND (expires_at IS NULL OR expires_at > ?)"


COLUMNS = "id, bytes, created_at, expires_at, filename, purpose"  # those of a StoredFile


class StoredFile(Struct, frozen=True, kw_only=True):
    """OpenAI's file object."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


class FileStore:
    """Files of a data directory.  Every method blocks."""

    def __init__(
        self,
        database: BatchDatabase,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
        max_files: int = MAX_FILES,
    ) -> None:
        """max_bytes: of all files together, including those that are being written."""
        self.database = database
        self.max_bytes = max_bytes
        self._max_files = max_files
        self._clock = clock

    def path(self, id: str) -> Path:
        """The path of the file's bytes.  `id` is one of `insert`."""
        return self.database.directory / "files" / id

    def begin(self, owner: bytes, num_bytes: int) -> str:
        """Reserve room for an upload.  Raises RequestError, RateLimited if there is none."""
        with self.database.transaction() as connection:
            count, used = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files"
            ).fetchone()
            if count >= self._max_files:
                raise full(
                    "files_full",
                    "{} files are stored, at most {} are allowed: delete some",
                    (count, self._max_files),
                )
            if used + num_bytes > self.max_bytes:
                raise full(
                    "data_full",
                    "{} bytes are stored or on their way, {} more exceed the limit of {}: delete "
                    "files (the operator can raise --max-data-bytes)",
                    (used, num_bytes, self.max_bytes),
                )
            return self.insert(connection, owner, "uploading", num_bytes)

    def is_full(self) -> bool:
        """Whether stored files have reached the limit, so that batches should stop writing."""
        with self.database.reading() as connection:
            used = connection.execute(
                "SELECT COALESCE(SUM(bytes), 0) FROM files WHERE state != 'uploading'"
            ).fetchone()[0]
        return used >= self.max_bytes

    def insert(
        self, connection: sqlite3.Connection, owner: bytes, state: str, num_bytes: int = 0
    ) -> str:
        """A row whose file is not whole yet; returns its id."""
        id = f"file-{uuid.uuid4().hex[:24]}"
        connection.execute(
            "INSERT INTO files (id, owner, state, filename, purpose, bytes, created_at)"
            " VALUES (?, ?, ?, '', '', ?, ?)",
            (id, owner.hex(), state, num_bytes, int(self._clock())),
        )
        return id

    def finish(
        self,
        connection: sqlite3.Connection,
        id: str,
        *,
        filename: str,
        purpose: str,
        num_bytes: int,
        keep_seconds: int | None,
    ) -> StoredFile:
        """Mark a file as complete, which makes it visible to clients."""
        now = int(self._clock())
        expires = None if keep_seconds is None else now + keep_seconds
        [row] = connection.execute(
            "UPDATE files SET state = 'processed', filename = ?, purpose = ?, bytes = ?,"
            f" created_at = ?, expires_at = ? WHERE id = ? RETURNING {COLUMNS}",
            (filename, purpose, num_bytes, now, expires, id),
        )
        return StoredFile(**row)

    def find(self, owner: bytes, id: str, param: FieldPath | None = None) -> StoredFile:
        """Raises NotFound, also for files of other owners."""
        with self.database.reading() as connection:
            row = connection.execute(
                f"SELECT {COLUMNS} FROM files WHERE owner = ? AND id = ? AND {VISIBLE}",
                (owner.hex(), id, self._clock()),
            ).fetchone()
        if row is None:
            raise NotFound(
                "no file `{}` is here: GET /v1/files lists those that are",
                id[:64],
                param=param,
                code="file_not_found",
            )
        return StoredFile(**row)

    def page(self, owner: bytes, query: FileQuery) -> tuple[list[StoredFile], bool]:
        """A page of files by age, and whether there are more.  Raises RequestError."""
        where, values = f"owner = ? AND {VISIBLE}", [owner.hex(), self._clock()]
        compare, order = (">", "ASC") if query.order == "asc" else ("<", "DESC")
        if query.purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, query.purpose]
        with self.database.reading() as connection:
            if query.after is not None:
                number = number_of(connection, "files", owner, query.after)
                where, values = f"{where} AND number {compare} ?", [*values, number]
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM files WHERE {where} ORDER BY number {order} LIMIT ?",
                (*values, query.limit + 1),
            ).fetchall()
        return [StoredFile(**row) for row in rows[: query.limit]], len(rows) > query.limit

    def delete(self, owner: bytes, id: str) -> None:
        """Raises NotFound, or RequestError while a batch reads it."""
        self.find(owner, id)
        with self.database.transaction() as connection:
            reader = connection.execute(
                f"SELECT id FROM batches WHERE {IS_OPEN} AND input_id = ?",
                (id,),
            ).fetchone()
            if reader is not None:
                raise RequestError(
                    "the file `{}` is the input of `{}`, which has not ended: cancel that batch "
                    "or wait for its end",
                    (id, reader[0]),
                    param=FieldPath("file_id"),
                    code="file_in_use",
                )
            connection.execute("UPDATE files SET state = 'deleting' WHERE id = ?", (id,))
        self.remove(id)

    def remove(self, id: str) -> None:
        """Bytes first, then the row."""
        with contextlib.suppress(FileNotFoundError):
            self.path(id).unlink()
        with self.database.transaction() as connection:
            connection.execute("DELETE FROM files WHERE id = ?", (id,))

    def sweep(self) -> None:
        """Remove files that have expired, are marked as deleted, or were never completed."""
        now = self._clock()
        with self.database.reading() as connection:
            rows = connection.execute(
                "SELECT id FROM files WHERE state = 'deleting'"
                " OR (state = 'uploading' AND created_at < ?)"
                " OR (state = 'processed' AND expires_at <= ? AND id NOT IN"
                f" (SELECT input_id FROM batches WHERE {IS_OPEN}))",
                (now - UPLOAD_SECONDS, now),
            ).fetchall()
        for (id,) in rows:
            self.remove(id)
