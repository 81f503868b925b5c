"""A web server of bytes that a test writes, and fetchers that may reach it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from server.images.addresses import AllowedHosts
from server.images.fetch import ImageFetcher

Answer = bytes | Callable[[asyncio.StreamWriter], object]


@dataclass
class ImageHost:
    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)  # of each path
    requests: list[bytes] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def url(self, path: str, host: str = "pictures.test") -> str:
        return f"http://{host}:{self.port}{path}"

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(lambda task: (self._tasks.discard(task), writer.transport.abort()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # their connections close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            answer = self.answers.get(head.split()[1].decode(), http(b"", "404 Not Found"))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)  # type: ignore[misc]
            writer.close()
            await writer.wait_closed()


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return http(b"elsewhere", status, f"Location: {to}")


@contextlib.asynccontextmanager
async def image_host() -> AsyncIterator[ImageHost]:
    host = ImageHost()
    server = await asyncio.start_server(host.take, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    async with server:
        yield host
        await host.stop()


def fetcher(host: ImageHost, *hosts: str, **options: object) -> ImageFetcher:
    """One whose every name is this machine's, which it takes for public."""

    async def here(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    names = hosts or (f"pictures.test:{host.port}",)
    settings = {"resolve": here, "permitted": lambda address: True} | options
    return ImageFetcher(AllowedHosts.parse(",".join(names)), **settings)  # type: ignore[arg-type]
