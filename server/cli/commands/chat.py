"""`wavefill chat`: talk to a running server in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from server.cli.main import KEY, first_key

HELP = "/reset starts over, /system TEXT sets the instructions, /exit ends"
TIMEOUT_SECONDS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Talk to a running server.  In the chat: {HELP}.  If the server asks for a key, set {KEY}."
    )
    parser.add_argument(
        "--base-url",
        "--url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="where the server is, with or without the /v1",
    )
    parser.add_argument("--model", default="", help="name of the model; empty: the server's first")
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions for the model")
    parser.add_argument("--temperature", type=float, help="left out: the model's own")


class ChatServer:
    """The few HTTP calls that a chat needs.  Every failure is a ChatServerError."""

    def __init__(self, url: str, key: str) -> None:
        split = urlsplit(url if "//" in url else f"http://{url}")
        self._kind = HTTPSConnection if split.scheme == "https" else HTTPConnection
        self._address = split.netloc
        self._path = split.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def _open(self, method: str, path: str, body: object = None) -> Iterator[bytes]:
        """The lines of the answer, as they come."""
        connection = self._kind(self._address, timeout=TIMEOUT_SECONDS)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                reason = _message(response.read()) or f"HTTP {response.status}"
                raise ChatServerError(f"{reason}: set {KEY}" if response.status == 401 else reason)
            yield from response
        except (OSError, HTTPException) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ChatServerError(
                f"{self._address}: {reason}: start the server, or give --base-url"
            ) from None
        finally:
            connection.close()

    def models(self) -> list[str]:
        answer = b"".join(self._open("GET", "/v1/models"))
        try:
            return [entry["id"] for entry in json.loads(answer)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ChatServerError(f"{self._address}: not an OpenAI-compatible server") from None

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """The text chunks of an answer."""
        for line in self._open("POST", "/v1/chat/completions", {**body, "stream": True}):
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ChatServerError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


class ChatServerError(Exception):
    """The server cannot be reached, or refused a request."""


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""


def run(args: argparse.Namespace) -> int:
    server = ChatServer(args.base_url, first_key(os.environ) or "none")
    try:
        served = server.models()
        if not served or (args.model and args.model not in served):
            raise ChatServerError(
                f"--model {args.model}: the server has {', '.join(served) or 'none'}"
            )
    except ChatServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    model = args.model or served[0]
    print(f"{model} at {args.base_url}: {HELP}")
    options = {} if args.temperature is None else {"temperature": args.temperature}
    system = args.system
    turns: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return 0
        match text.split(maxsplit=1):
            case []:
                continue
            case ["/exit"]:
                return 0
            case ["/reset"]:
                turns = []
            case ["/system", words]:
                system, turns = words, []
            case [word, *_] if word.startswith("/"):
                print(f"{word} is not a command here: {HELP}")
            case _:
                turns.append({"role": "user", "content": text})
                answer = _answer(server, {"model": model, **options}, system, turns)
                turns = [*turns, answer] if answer else turns[:-1]


def _answer(
    server: ChatServer, body: dict[str, Any], system: str, turns: list[dict[str, str]]
) -> dict[str, str] | None:
    """Print the answer as it comes; None if there is none to remember."""
    first = [{"role": "system", "content": system}] if system else []
    chunks: list[str] = []
    try:
        for chunk in server.stream({**body, "messages": [*first, *turns]}):
            chunks.append(chunk)
            print(chunk, end="", flush=True)
    except ChatServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    except KeyboardInterrupt:  # enough of this answer; what came stays in the context
        pass
    print()
    return {"role": "assistant", "content": "".join(chunks)}
