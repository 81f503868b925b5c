"""The callers of the soak: what each kind sends, and what it does while it waits and reads."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.server import soak_answers
from benchmarks.server.soak_answers import Body, Judge, Outcome, outcome

ANSWER_SECONDS = 90.0  # an answer that takes longer is lost
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SHARED = "Once upon a time there was a river. " * 40  # a prefix that many requests have
# More than the server's kernel buffers, at 5 kB/s, which is slower than tokens come.
SLOW_BYTES, SLOW_READ, SLOW_PAUSE = 100_000, 256, 0.05


@dataclass(frozen=True)
class Seen:
    """What became of one request; `port` is the caller's."""

    kind: str
    outcome: Outcome
    port: int = 0


def completion(rng: random.Random, **changes: Any) -> Body:
    body = {"model": "tiny-chat", "prompt": f"story {rng.random()}", "ignore_eos": True}
    return {**body, "max_tokens": rng.randint(4, 48), "stream": True, **changes}


def with_usage(rng: random.Random, **changes: Any) -> Body:
    return completion(rng, stream_options={"include_usage": True}, **changes)


def with_ids(rng: random.Random, **changes: Any) -> Body:
    return completion(rng, return_token_ids=True, **changes)


def chat(rng: random.Random) -> Body:
    messages = [{"role": "user", "content": f"A city, please ({rng.randint(0, 9)})"}]
    body = {"model": "tiny-chat", "messages": messages, "max_tokens": 48}
    form = {"name": "city", "schema": SCHEMA}
    return {**body, "response_format": {"type": "json_schema", "json_schema": form}}


# Of valid requests, how often each is sent, and its body.
VALID: dict[str, tuple[int, Callable[[random.Random], Body]]] = {
    "streamed": (4, with_usage),
    "streamed ids": (2, with_ids),
    "whole": (4, lambda rng: completion(rng, stream=False)),
    "several": (2, lambda rng: with_ids(rng, n=3, max_tokens=12)),
    "prefix": (2, lambda rng: with_usage(rng, prompt=SHARED + str(rng.random()))),
    "constrained": (2, chat),
    "dropped": (2, lambda rng: completion(rng, max_tokens=400)),  # while the answer comes
    "given up": (1, lambda rng: completion(rng, max_tokens=400)),  # at any time, at once too
    "half sent": (1, completion),  # leaves before the end of its body
    "slow": (1, lambda rng: with_ids(rng, max_tokens=500, logprobs=5)),
}
LEAVING = ("dropped", "given up", "half sent")
# Wrong requests: the bytes of a body, and the status that it gets.
WRONG: tuple[tuple[bytes, int], ...] = (
    (b'{"model": "tiny-chat", "prompt": ', 400),
    (b'{"model": "tiny-chat", "prompt": "a", "max_tokens": -1}', 400),
    (b'{"model": "tiny-chat", "prompt": "a", "no_such_field": 1}', 400),
    (b'{"model": "tiny-chat", "prompt": "a", "n": 100000}', 400),
    (b'{"model": "nothing", "prompt": "a"}', 404),
    (b'{"model": "tiny-chat", "prompt": "' + b"long " * 20_000 + b'"}', 400),
    (b"\x00\xff\xfe", 400),
    (b"[" * 50_000, 400),
)


def request_bytes(body: bytes, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """A request whose answer ends with the connection."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def call(port: int, rng: random.Random) -> Seen:
    """One request of a kind that is chosen at random."""
    if rng.random() < 0.15:
        content, status = rng.choice(WRONG)
        return await _ask(port, "wrong", request_bytes(content), soak_answers.refusal(status))
    names = list(VALID)
    kind = rng.choices(names, [VALID[name][0] for name in names])[0]
    body = VALID[kind][1](rng)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    data = request_bytes(json.dumps(body).encode(), path)
    judge = (soak_answers.stream if body.get("stream") else soak_answers.whole)(body)
    match kind:
        case "dropped":
            return await _ask(port, kind, data, judge, leave_after=rng.randint(0, 12_000))
        case "given up":
            return await _ask(port, kind, data, judge, leave_within=rng.uniform(0, 2))
        case "half sent":
            data, seconds = data[: rng.randint(1, len(data) - 1)], rng.uniform(0, 0.2)
            return await _ask(port, kind, data, judge, leave_within=seconds)
        case _:
            return await _ask(port, kind, data, judge, slow=kind == "slow")


async def _ask(
    port: int,
    kind: str,
    request: bytes,
    judge: Judge,
    *,
    leave_after: int | None = None,  # bytes
    leave_within: float | None = None,  # seconds
    slow: bool = False,
) -> Seen:
    """Send, read to the end of the connection or until the caller leaves, and judge."""
    raw, writer, own = bytearray(), None, 0
    try:
        async with asyncio.timeout(leave_within or ANSWER_SECONDS):
            connection = await _connected(port, slow)
            own = connection.getsockname()[1]
            # What asyncio reads ahead is twice the limit.
            limit = SLOW_READ if slow else 65536
            reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
            writer.write(request)
            await writer.drain()
            while piece := await reader.read(limit):
                raw += piece
                if leave_after is not None and len(raw) > leave_after:
                    return Seen(kind, Outcome("left"), own)
                if slow and len(raw) < SLOW_BYTES:
                    await asyncio.sleep(SLOW_PAUSE)
    except TimeoutError:
        if leave_within is not None:
            return Seen(kind, Outcome("left"), own)
        lost = f"no end in {ANSWER_SECONDS:.0f} s after {len(raw)} bytes"
        return Seen(kind, Outcome("wrong", lost), own)
    except OSError as error:
        return Seen(kind, Outcome("broken", f"{type(error).__name__} {error}"), own)
    finally:
        if writer is not None:
            writer.close()
    return Seen(kind, outcome(bytes(raw), judge), own)


async def _connected(port: int, slow: bool) -> socket.socket:
    connection = socket.socket()
    if slow:
        # Small segments and a small window, so that the server's buffer is small, too, and full.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return connection
