"""What a chat template can print of calls in a conversation, and conversations that fit it.

Clients send conversations as OpenAI's API has them: several calls in a message, ids of any form,
and null for the content beside calls.  Some templates print the first call only, raise an exception
for an id that does not have nine characters, or print null as the word None.  Which of these a
template does is seen from what it makes of small conversations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import RequestError
from server.prompt.chat_template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
MAX_PROBED = 1 << 20  # characters of a prompt with a few words
ID_CHARS = 9  # of an id that Mistral's templates take
LONG_ID = "call_0123456789abcdefghijklmn"
SHORT_ID = "a1b2c3d4e"
NAMES = ("first_probe", "second_probe")


@dataclass(frozen=True)
class CallTraits:
    """What must be changed in a conversation for a template to print it."""

    short_ids: bool = False  # ids of nine letters and digits only
    text_content: bool = False  # "" in place of null beside calls
    one_call: bool = False  # one call a message, its result behind it

    @classmethod
    def of(cls, template: ChatTemplate | None) -> CallTraits:
        """Those of the template: none where it has no place for calls."""
        if template is None or not template.mentions("tool_calls"):
            return cls()
        # Each is looked for with the conversations changed as those found before it ask for.
        long, short = (_printed(template, _conversation(id, "", 1)) for id in (LONG_ID, SHORT_ID))
        short_ids = long is None and short is not None
        id = SHORT_ID if short_ids else LONG_ID
        text, null = (_printed(template, _conversation(id, each, 1)) for each in ("", None))
        wrong = null is None or null.count("None") > (text or "").count("None")
        text_content = text is not None and wrong
        content = "" if text_content else None
        both = _printed(template, _conversation(id, content, 2))
        one_call = NAMES[0] in (text or null or "") and NAMES[1] not in (both or "")
        return cls(short_ids, text_content, one_call)

    def fitted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as the template can print it."""
        found = list(messages)
        if self.short_ids:
            found = [_with_short_ids(message) for message in found]
        if self.text_content:
            found = [
                message | {"content": ""} if message.get("content") is None else message
                for message in found
            ]
        return list(_calls_apart(found)) if self.one_call else found


def _conversation(id: str, content: str | None, num_calls: int) -> Messages:
    """A question, calls, and their results."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": {"a": "b"}}}
        for name in NAMES[:num_calls]
    ]
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": id, "content": "c"}
    return [question, answer, *[result] * num_calls]


def _printed(template: ChatTemplate, messages: Messages) -> str | None:
    """The prompt; None if the template refuses the messages."""
    try:
        return template.render(
            messages,
            add_generation_prompt=True,
            continue_final_message=False,
            max_chars=MAX_PROBED,
            extra={},
        )
    except RequestError:
        return None


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_call_id" in message:
        return message | {"tool_call_id": short_id(message["tool_call_id"])}
    if message.get("tool_calls"):
        calls = [call | {"id": short_id(call["id"])} for call in message["tool_calls"]]
        return message | {"tool_calls": calls}
    return message


def short_id(id: str) -> str:
    """The id itself if it fits, else nine characters that depend on it alone: the same prefix of a
    conversation is the same prompt."""
    if len(id) == ID_CHARS and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:ID_CHARS]


def _calls_apart(messages: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Each call in a message of its own, followed by its results."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        start = place
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        results = list(messages[start:place])
        for index, call in enumerate(calls):
            # What was said and thought before the calls stands before the first.
            said = message if index == 0 else {"role": "assistant", "content": ""}
            yield said | {"tool_calls": [call]}
            its = [each for each in results if each.get("tool_call_id") == call["id"]]
            if any(later["id"] == call["id"] for later in calls[index + 1 :]):
                its = its[:1]
            yield from its
            results = [each for each in results if not any(each is one for one in its)]
        yield from results
