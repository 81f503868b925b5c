"""One request to an OpenAI-compatible server, and the time stamps of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import orjson

from server.bench.http import ConnectionLost, HttpClient, OnChunk, ResponseCut
from server.bench.metrics import Failure, Outcome, RequestResult
from server.bench.workload import PATHS, Workload
from server.cli.main import KEY

DONE = b"[DONE]"


class ServerError(Exception):
    """The server cannot be measured; the message says why."""


class Lines:
    """Splits a stream of bytes into the data of its server-sent events, one event a line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of the events that this chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Recorder:
    """Reads the events of one answer."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.deliveries: list[float] = []
        self.usage: dict[str, Any] | None = None
        self.error: str | None = None
        self.done = False
        self._last = 0.0

    def event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.done = True
            return
        message = orjson.loads(data)
        if error := message.get("error"):
            self.error = orjson.dumps(error).decode()
            return
        self.usage = message.get("usage") or self.usage
        choices = message.get("choices")
        if choices:
            self._last = now
            if _has_text(choices[0]):
                self.deliveries.append(now)

    def outcome(self) -> Outcome:
        if self.error is not None:
            return Failure("error in the stream", self.error)
        if not self.done:
            return Failure("stream cut off", "the connection closed before [DONE]")
        if self.usage is None:
            return Failure("no usage", "the stream has no usage: tokens cannot be counted")
        if not self.deliveries and not self._last:
            return Failure("empty answer", "the stream has no choices")
        details = cast(dict[str, int], self.usage.get("prompt_tokens_details") or {})
        return RequestResult(
            start=self.start,
            # Tokens without text (control tokens) were there by the time of the last choice.
            deliveries=tuple(self.deliveries) or (self._last,),
            prompt_tokens=self.usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            output_tokens=self.usage.get("completion_tokens") or 0,
        )


def _has_text(choice: dict[str, Any]) -> bool:
    if "text" in choice:
        return bool(choice["text"])
    delta = cast(dict[str, Any], choice.get("delta") or {})
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning"))


class BenchClient:
    """Talks to `base_url`, such as http://127.0.0.1:8000/v1.  An async context manager."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._base = base_url
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = HttpClient(base_url, headers)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> BenchClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    async def first_model(self) -> str:
        """The first name in /v1/models.  Raises ServerError."""
        url, body = f"{self._base}/models", bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._http.send("GET", "/models", b"", lambda _: _into(body))
        except (ConnectionLost, ResponseCut, TimeoutError) as error:
            raise ServerError(
                f"{url}: {_reason(error)}: start the server, or give the right --base-url"
            ) from None
        if status != 200:
            raise ServerError(f"{url} answers {status}: {_refusal(status, body)}")
        try:
            return str(orjson.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{url} lists no model: name one with --model") from None

    async def ask(self, workload: Workload, body: dict[str, object], start: float) -> Outcome:
        """Send one request and read its answer to the end.  Never raises for what goes wrong."""
        recorder, lines, refusal = Recorder(start), Lines(), bytearray()

        def on_chunk(chunk: bytes, now: float) -> None:
            for data in lines.feed(chunk):
                recorder.event(data, now)

        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._http.send(
                    "POST",
                    PATHS[workload.endpoint],
                    orjson.dumps(body),
                    lambda status: on_chunk if status == 200 else _into(refusal),
                )
        except TimeoutError:
            return Failure("timeout", "no complete answer within --timeout")
        except ResponseCut as error:
            return Failure("stream cut off", _reason(error))
        except ConnectionLost as error:
            return Failure("connection", _reason(error))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return Failure("malformed answer", _reason(error))
        if status == 200:
            return recorder.outcome()
        return Failure(f"HTTP {status}", _refusal(status, refusal))


def _into(body: bytearray) -> OnChunk:
    def on_chunk(chunk: bytes, now: float) -> None:
        body.extend(chunk)

    return on_chunk


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _refusal(status: int, body: bytearray) -> str:
    """The message of an error in OpenAI's form; of anything else the beginning."""
    try:
        message = orjson.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")
    reason = " ".join(str(message)[:300].split())
    return f"{reason}: give --api-key or set {KEY}" if status == 401 else reason
