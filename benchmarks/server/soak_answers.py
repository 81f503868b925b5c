"""What a caller of the soak got: a whole answer, a refusal, an error, or half an answer.

Everything here works on the bytes of one connection that has ended, so that an answer which is cut
and one with something behind its end are told apart from one that is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

Body = dict[str, Any]
BUSY = (429, 503)
# In this order: complete; left by the caller; refused as it should be; full or loading; ended by an
# error; no answer, or one without an end; an answer that is wrong, or none in a long time.
ENDS = ("complete", "left", "refused", "busy", "error", "broken", "wrong")


class Outcome(NamedTuple):
    """`end` is a word of `ENDS`, `detail` says more about a wrong one; tokens of a complete one."""

    end: str
    detail: str = ""
    tokens: int = 0


# Takes the status and the content of an answer that is whole; raises Wrong, or what json raises.
Judge = Callable[[int, bytes], Outcome]


class Broken(Exception):
    """The answer stops in the middle, as it does when its process is killed."""


class Wrong(Exception):
    """An answer that no request may get."""


def outcome(raw: bytes, judge: Judge) -> Outcome:
    """Of all bytes that a connection with one request brought."""
    try:
        status, content = _split(raw)
        if status not in BUSY:
            return judge(status, content)
        return Outcome("busy") if _message(content) else _wrong(status, content)
    except Broken as error:
        return Outcome("broken", str(error))
    except (Wrong, ValueError, LookupError, TypeError) as error:
        return Outcome("wrong", f"{type(error).__name__} {error}: {raw[:100]!r}...{raw[-200:]!r}")


def _split(raw: bytes) -> tuple[int, bytes]:
    """Status and content of the only answer."""
    head, separator, rest = raw.partition(b"\r\n\r\n")
    if not separator:
        raise Broken(f"closed after {len(raw)} bytes, before the end of the headers")
    status, head = int(head.split(None, 2)[1]), head.lower()
    if b"\r\ntransfer-encoding: chunked" in head:
        content, rest = _dechunked(rest)
    else:
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        if length is None:
            raise Wrong("neither chunks nor a length")
        content, rest = rest[: int(length[1])], rest[int(length[1]) :]
        if len(content) < int(length[1]):
            raise Broken(f"{len(content)} of {int(length[1])} bytes")
    if rest:
        raise Wrong(f"{len(rest)} bytes behind the end of the answer")
    return status, content


def _dechunked(data: bytes) -> tuple[bytes, bytes]:
    """The content, and what follows the last chunk, of zero bytes."""
    pieces: list[bytes] = []
    start = 0
    while (end := data.find(b"\r\n", start)) >= 0:
        length = int(data[start:end], 16)
        start = end + 2 + length + 2
        if len(data) < start:
            break
        if data[start - 2 : start] != b"\r\n":
            raise Wrong("a chunk is longer than it says")
        if length == 0:
            return b"".join(pieces), data[start:]
        pieces.append(data[end + 2 : start - 2])
    raise Broken(f"the stream has no end after {len(data)} bytes")


def refusal(expected: int) -> Judge:
    """Of a request that is wrong, which gets this status and a message."""

    def judge(status: int, content: bytes) -> Outcome:
        right = status == expected and _message(content)
        return Outcome("refused") if right else _wrong(status, content)

    return judge


def whole(body: Body) -> Judge:
    """Of a request that does not stream: every token, or JSON as its schema says."""

    def judge(status: int, content: bytes) -> Outcome:
        answer = json.loads(content)
        if _engine_error(status, answer):
            return Outcome("error")
        (choice,) = answer["choices"]
        tokens = answer["usage"]["completion_tokens"]
        if "messages" in body:
            named = body["response_format"]["json_schema"]["schema"]["properties"]["city"]["enum"]
            right = json.loads(choice["message"]["content"])["city"] in named
        else:
            right = tokens == body["max_tokens"] and choice["finish_reason"] == "length"
        return (
            Outcome("complete", "", tokens) if status == 200 and right else _wrong(status, answer)
        )

    return judge


def stream(body: Body) -> Judge:
    """Of a request that streams: each choice has its tokens and one end, the stream one [DONE]."""

    def judge(status: int, content: bytes) -> Outcome:
        if status != 200:  # before the first event there is no stream
            early = _engine_error(status, json.loads(content)) and not body.get("return_token_ids")
            return Outcome("error") if early else _wrong(status, content)
        *lines, last = content.split(b"\n\n")
        events = [line for line in lines if not line.startswith(b":")]  # comments keep it alive
        if last or not all(event.startswith(b"data: ") for event in events):
            raise Wrong("an event is no line of data")
        if events.pop() != b"data: [DONE]":
            raise Wrong("the last event is not [DONE]")
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
        if "error" in chunks[-1]:
            # Text may wait for the rest of a character; ids do not.
            ids = [each.get("token_ids") for chunk in chunks[:-1] for each in chunk["choices"]]
            if body.get("return_token_ids") and not any(ids):
                raise Wrong("an error before the first token: the engine could be asked again")
            return Outcome("error")
        return Outcome("complete", "", _tokens_of(chunks, body))

    return judge


def _tokens_of(chunks: list[Any], body: Body) -> int:
    """How many there are, by ids or by the usage.  Raises Wrong unless each choice has all."""
    count, most = body.get("n", 1), body["max_tokens"]
    ended: list[int] = []
    ids = [0] * count
    usage: list[int] = []
    for chunk in chunks:
        usage += [chunk["usage"]["completion_tokens"]] if chunk.get("usage") else []
        for choice in chunk["choices"]:
            if choice["index"] in ended:
                raise Wrong(f"choice {choice['index']} goes on after its end")
            ids[choice["index"]] += len(choice.get("token_ids") or ())
            if choice["finish_reason"] is not None:
                ended.append(choice["index"])
    if sorted(ended) != list(range(count)):
        raise Wrong(f"choices {ended} of {count} have an end")
    if body.get("return_token_ids") and ids != [most] * count:
        raise Wrong(f"{ids} token ids instead of {most} in each choice")
    if "stream_options" in body and usage != [count * most]:
        raise Wrong(f"a usage of {usage} tokens instead of {count * most}")
    return count * most


def _engine_error(status: int, answer: Any) -> bool:
    return status == 500 and answer["error"]["code"] == "engine_error"


def _message(content: bytes) -> str:
    return json.loads(content)["error"]["message"]


def _wrong(status: int, content: object) -> Outcome:
    return Outcome("wrong", f"{status} {str(content)[-300:]}")
