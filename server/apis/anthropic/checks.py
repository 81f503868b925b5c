"""Rules for bodies of /v1/messages beyond the types of their fields."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from server.apis.anthropic.schema import MessageParam, ToolResultBlock, ToolUseBlock
from server.apis.media import Readable
from server.apis.openai.sampling_schema import LATER
from server.apis.openai.tools_schema import MAX_TOOLS
from server.errors import ContextTooLong, FieldPath, RequestError, UnsupportedParameter
from server.http.validation import MAX_MESSAGES, Unsupported, fields_of, items_of

OWNERS = {
    "tool_use": "assistant",
    "thinking": "assistant",
    "tool_result": "user",
    "image": "user",
}
MAX_BLOCKS = 16384  # each costs time to check, whatever it holds
MEDIA = ("image", "document", "search_result", "container_upload")


@contextmanager
def prompt_too_long() -> Generator[None]:
    """Refuses a prompt that is too long in Anthropic's words, by which its clients know that they
    have to shorten the conversation."""
    try:
        yield
    except ContextTooLong as error:
        raise RequestError(
            "prompt is too long: {} tokens > {} maximum, as the answer needs one of the {}: "
            "shorten the conversation",
            (error.prompt_len, error.limit - 1, error.limit),
            code=error.code,
        ) from None


def check_turns(messages: Sequence[MessageParam]) -> None:
    """Blocks belong to the role of their message, and every result to a call.

    Raises RequestError.
    """
    called: set[str] = set()
    for index, message in enumerate(messages):
        after_text = False
        for place, block in enumerate(message.blocks()):
            path = FieldPath("messages", index, "content", place)
            owner = OWNERS.get(block.type, message.role)
            if owner != message.role:
                raise RequestError(
                    "{} is a {} block, which belongs to role {}, not {}: move it",
                    (path, block.type, owner, message.role),
                )
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock):
                _check_result(block, path, after_text, called)
            after_text = after_text or block.type == "text"


def _check_result(
    block: ToolResultBlock, path: FieldPath, after_text: bool, called: set[str]
) -> None:
    if block.tool_use_id not in called:
        raise RequestError(
            "{} is {}, which no earlier tool_use block has: send the assistant's message with it "
            "first",
            (path / "tool_use_id", block.tool_use_id[:60]),
        )
    if after_text:
        raise RequestError(
            "{} is a tool_result block after a text block: put the results first", path
        )


def refuse_known(fields: dict[str, Any], readable: Readable) -> None:
    """Raises UnsupportedParameter for blocks and tools of Anthropic's that this server lacks."""
    for count, (path, block) in enumerate(_blocks(fields)):
        if count == MAX_BLOCKS:
            raise RequestError(
                "{messages} has more than {} content blocks: put texts together", MAX_BLOCKS
            )
        kind = fields_of(block).get("type")
        if kind in MEDIA:
            readable.check(kind, path / "type", image="image", text="text")
        if isinstance(kind, str) and (kind == "redacted_thinking" or kind.startswith("server_")):
            _refuse(
                path / "type",
                f"is {kind[:40]}, which only Anthropic's own service can read: leave it out",
            )
    for index, tool in enumerate(items_of(fields.get("tools"))[:MAX_TOOLS]):
        kind = fields_of(tool).get("type")
        if isinstance(kind, str) and kind != "custom":
            _refuse(
                FieldPath("tools", index, "type"),
                f"is {kind[:40]}, a tool of Anthropic's own: describe one of your own with `name`, "
                "`description` and `input_schema`",
            )
        if fields_of(tool).get("input_examples"):
            _refuse(
                FieldPath("tools", index, "input_examples"),
                "is not supported by this server: put examples into `description`",
            )


def _refuse(path: FieldPath, reason: str) -> NoReturn:
    raise UnsupportedParameter("{} {}", (path, reason))


def _blocks(fields: dict[str, Any]) -> Iterator[tuple[FieldPath, Any]]:
    """Every content block with its path."""
    for index, message in enumerate(items_of(fields.get("messages"))[:MAX_MESSAGES]):
        for place, block in enumerate(items_of(fields_of(message).get("content"))):
            path = FieldPath("messages", index, "content", place)
            yield path, block
            for inner, part in enumerate(items_of(fields_of(block).get("content"))):
                yield path / "content" / inner, part


UNSUPPORTED: Mapping[str, Unsupported] = {
    "billing_policy": Unsupported(LATER),
    "compaction": Unsupported("shorten `messages` yourself"),
    "container": Unsupported(LATER),
    "context_management": Unsupported("shorten `messages` yourself"),
    "diagnostics": Unsupported(LATER),
    "fallback_credit_token": Unsupported(LATER),
    "fallbacks": Unsupported("no answer is declined here; leave it out", "default", []),
    "inference_geo": Unsupported("the server runs where it runs; leave it out"),
    "mcp_servers": Unsupported("call the servers yourself and offer `tools`", []),
    "speed": Unsupported("use standard", "standard"),
    "thread": Unsupported("no conversation is kept for you; send all `messages` without it"),
    "user_profile_id": Unsupported(LATER),
}
