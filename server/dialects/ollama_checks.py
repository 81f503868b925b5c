"""What Ollama's API has and this server has not, refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.errors import RequestError, UnsupportedParameter
from server.schema.base import MOST_MESSAGES, Unsupported, fields_of, items_of
from server.schema.sampling import LATER

MOST_CALLS = 16384  # each costs time to check, whatever it holds
FIELDS: Mapping[str, Unsupported] = {
    "template": Unsupported("the model's own chat template is used; or send `raw`", ""),
    "context": Unsupported("send the conversation to /api/chat", []),
    "truncate": Unsupported("a prompt that is too long is an error; use false", False),
    "shift": Unsupported("an answer ends where the context does; use false", False),
    "width": Unsupported(LATER, 0),
    "height": Unsupported(LATER, 0),
    "steps": Unsupported(LATER, 0),
}
OPTIONS: Mapping[str, Unsupported] = {
    "mirostat": Unsupported("use `top_p` or `min_p`", 0),
    "mirostat_tau": Unsupported("it belongs to `mirostat`"),
    "mirostat_eta": Unsupported("it belongs to `mirostat`"),
    "tfs_z": Unsupported("use `top_p` or `min_p`", 1, 1.0),
    "typical_p": Unsupported("use `top_p` or `min_p`", 1, 1.0),
    "repeat_last_n": Unsupported("penalties look at the whole text; use -1", -1),
    "penalize_newline": Unsupported("every token is treated alike; use true", True),
    "f16_kv": Unsupported("the server's --kv-dtype decides"),
    "logits_all": Unsupported("use `logprobs`", False),
    "vocab_only": Unsupported(LATER, False),
    "embedding_only": Unsupported(LATER, False),
}


def known_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The body without options that ask for nothing.

    Raises UnsupportedParameter for an option or an image that cannot be honoured.
    """
    calls = 0
    for index, message in enumerate(items_of(fields.get("messages"))[:MOST_MESSAGES]):
        calls += len(items_of(fields_of(message).get("tool_calls")))
        if calls > MOST_CALLS:
            raise RequestError(
                f"`messages` has more than {MOST_CALLS} tool calls: send fewer", param="messages"
            )
        if fields_of(message).get("images"):
            _refuse_images(f"messages[{index}].images")
    if fields.get("images"):
        _refuse_images("images")
    options = fields_of(fields.get("options"))
    kept = dict(options)
    for name, entry in OPTIONS.items():
        if name in kept and not entry.asks_for_nothing(kept.pop(name)):
            raise UnsupportedParameter(
                f"`options.{name}` is not supported by this server: {entry.remedy}",
                param=f"options.{name}",
            )
    return {**fields, "options": kept} if len(kept) < len(options) else fields


def _refuse_images(path: str) -> None:
    raise UnsupportedParameter(
        f"`{path}`: this model reads text only; leave images out", param=path
    )
