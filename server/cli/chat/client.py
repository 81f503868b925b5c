"""The HTTP calls that a chat needs, to any OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from server.cli.main import KEY

TIMEOUT_SECONDS = 600.0


class ChatServerError(Exception):
    """The server cannot be reached, or refused a request; `status` is HTTP's, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ChatServer:
    """Every failure is a ChatServerError."""

    def __init__(self, url: str, key: str) -> None:
        """key: "" for none"""
        split = urlsplit(url if "//" in url else f"http://{url}")
        self._kind = HTTPSConnection if split.scheme == "https" else HTTPConnection
        self._address = split.netloc
        self._path = split.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def _open(
        self, method: str, path: str, body: object = None, timeout: float = TIMEOUT_SECONDS
    ) -> Iterator[bytes]:
        """The lines of the answer, as they come."""
        connection = self._kind(self._address, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                reason = _message(response.read()) or f"HTTP {response.status}"
                reason += f": set {KEY}" if response.status == 401 else ""
                raise ChatServerError(reason, response.status)
            yield from response
        except (OSError, HTTPException) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ChatServerError(
                f"{self._address}: {reason}: start the server, or give the right --base-url"
            ) from None
        finally:
            connection.close()

    def models(self, timeout: float = TIMEOUT_SECONDS) -> list[str]:
        answer = b"".join(self._open("GET", "/v1/models", timeout=timeout))
        try:
            return [entry["id"] for entry in json.loads(answer)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ChatServerError(f"{self._address}: not an OpenAI-compatible server") from None

    def not_ready(self) -> str | None:
        """Why the server does not answer requests yet; None if it does."""
        try:
            list(self._open("GET", "/readyz", timeout=5))
        except ChatServerError as error:
            return str(error)
        return None

    def accepts(self, body: dict[str, Any]) -> None:
        """Ask for one token, to find out whether such a request is accepted."""
        list(self._open("POST", "/v1/chat/completions", {**body, "max_tokens": 1}))

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of an answer; the one with `usage` has no choices."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        for line in self._open("POST", "/v1/chat/completions", asked):
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ChatServerError(event["error"]["message"])
            yield event


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
