"""One upload: parses the form as it arrives and writes its file to disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import BinaryIO

from starlette.requests import Request

from server.batches.database import in_thread
from server.batches.files import KEEP_SECONDS, FileStore, StoredFile
from server.batches.multipart import MultipartReader, boundary_of
from server.batches.schema import FileForm, form_fields
from server.errors import FieldPath, MissingParameter, RequestError
from server.http.request_context import owner_of
from server.http.validation import parse

CHUNK_BYTES = 1 << 20  # buffered for each call of a thread
MAX_FIELD_BYTES = 1024
MAX_NAME = 255  # characters of a file's name


async def receive_upload(request: Request, store: FileStore, max_bytes: int) -> StoredFile:
    """Store the file of a form; max_bytes: of the file.

    Raises UnsupportedMediaType, RequestError, and Unavailable if the disk is full.  An error that
    is not about the media type is raised after the whole body has been read: a client that still
    sends would not see the answer.
    """
    boundary = boundary_of(request.headers.get("content-type", ""))
    length = request.headers.get("content-length", "")
    reserved = min(int(length), max_bytes) if length.isdigit() else max_bytes
    chunks = _buffered(request.stream())
    try:
        id = await in_thread(store.begin, owner_of(request), reserved)
        upload = _Upload(store, id, boundary, max_bytes)
        try:
            async for chunk in chunks:
                await in_thread(upload.reader.feed, chunk)
            return await in_thread(upload.finish)
        except BaseException:
            upload.close()
            # No await: this task may have been cancelled because the client disconnected.
            asyncio.get_running_loop().run_in_executor(None, store.remove, id)
            raise
    except RequestError:
        async for _ in chunks:
            pass
        raise


async def _buffered(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    chunks: list[bytes] = []
    size = 0
    async for chunk in body:
        chunks.append(chunk)
        size += len(chunk)
        if size >= CHUNK_BYTES:
            yield b"".join(chunks)
            chunks, size = [], 0
    yield b"".join(chunks)


class _Upload:
    """Writes the form's field `file` to disk and collects the other fields."""

    def __init__(self, store: FileStore, id: str, boundary: bytes, max_bytes: int) -> None:
        self._store = store
        self._id = id
        self._max_bytes = max_bytes
        self.reader = MultipartReader(boundary, self)
        self._file: BinaryIO | None = None
        self._filename = ""
        self._num_bytes = 0
        self._fields: dict[str, str] = {}
        self._name = ""  # of the field that is being read
        self._value = b""

    def begin(self, name: str, filename: str | None) -> None:
        if name in self._fields or (name == "file" and self._file is not None):
            raise RequestError("{} is given twice: send it once", FieldPath(name[:64]))
        self._name, self._value = name, b""
        if name == "file":
            self._filename = (filename or "upload")[:MAX_NAME]
            self._file = self._store.path(self._id).open("xb")

    def data(self, chunk: bytes) -> None:
        if self._name != "file":
            self._value += chunk
            if len(self._value) > MAX_FIELD_BYTES:
                name = self._name[:64]
                raise RequestError(
                    "{} is longer than {} bytes: send less", (FieldPath(name), MAX_FIELD_BYTES)
                )
            return
        self._num_bytes += len(chunk)
        if self._num_bytes > self._max_bytes:
            raise RequestError(
                "{file} is larger than {} bytes: split it (the operator can raise "
                "--max-file-bytes)",
                self._max_bytes,
                code="file_too_large",
            )
        assert self._file is not None
        self._file.write(chunk)

    def end(self) -> None:
        if self._name != "file":
            try:
                self._fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                name = self._name[:64]
                raise RequestError("{} is not valid UTF-8: encode it", FieldPath(name)) from None

    def finish(self) -> StoredFile:
        """Check and store the form, after the whole body.  Raises RequestError."""
        self.reader.close()
        form = parse(FileForm, form_fields(self._fields))
        if self._file is None:
            raise MissingParameter("{file} is required: add it")
        if not self._num_bytes:
            raise RequestError("{file} is empty: send one with content")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        keep = KEEP_SECONDS if form.purpose == "batch" else None
        if form.expires_after is not None:
            keep = form.expires_after.seconds
        with self._store.database.transaction() as connection:
            return self._store.finish(
                connection,
                self._id,
                filename=self._filename,
                purpose=form.purpose,
                num_bytes=self._num_bytes,
                keep_seconds=keep,
            )

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
