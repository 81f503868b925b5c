"""The served models, as Ollama lists and describes them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict

from runtime.messages import Ready
from server.apis.ollama.schema import SAMPLING
from server.apis.reasoning_switch import can_think
from server.prompt.fim import fill_format
from server.state import ServerState

# The version of Ollama's API that is followed here, which its clients check before they send newer
# fields.  Our own is at /version.
API_VERSION = "0.12.11"
LATEST = ":latest"  # the tag that Ollama adds to a name without one
FOREVER = "9999-12-31T23:59:59Z"  # the model is never unloaded
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def served_name(state: ServerState, requested: str) -> str:
    """The requested name without the tag ":latest", if that is a served model's."""
    known = state.config.served_names
    plain = requested.removesuffix(LATEST)
    return plain if requested not in known and plain in known else requested


def tags(state: ServerState) -> list[dict[str, Any]]:
    """The served models."""
    ready = state.client.ready
    return [_entry(state, name, ready) for name in state.config.served_names]


def running(state: ServerState) -> list[dict[str, Any]]:
    """The loaded models: all of them, once the engine is ready."""
    ready = state.client.ready
    if ready is None:
        return []
    size = ready.weight_bytes + ready.kv_bytes
    on_device = {
        "size": size,
        "size_vram": 0 if ready.device.startswith("cpu") else size,
        "expires_at": FOREVER,
        "context_length": ready.max_model_len,
    }
    return [_entry(state, name, ready) | on_device for name in state.config.served_names]


def description(state: ServerState, ready: Ready) -> dict[str, Any]:
    """The answer of /api/show."""
    tokenizer = state.tokenizer
    template = tokenizer.template
    defaults = asdict(tokenizer.defaults)
    values = {option: defaults.get(name) for option, name in SAMPLING.items()}
    lines = [f"{option} {value}" for option, value in values.items() if value is not None]
    kind = ready.model_type
    return {
        "modified_at": _created(state),
        "parameters": "\n".join(lines),
        "template": "" if template is None else template.source,
        "details": _details(ready),
        "model_info": {
            "general.architecture": kind,
            f"{kind}.context_length": ready.max_model_len,
            f"{kind}.vocab_size": ready.vocab_size,
        },
        "capabilities": _capabilities(state),
    }


def _capabilities(state: ServerState) -> list[str]:
    tokenizer = state.tokenizer
    template = tokenizer.template
    found = ["completion"]
    if template is not None and template.mentions("tools"):
        found.append("tools")
    if can_think(tokenizer):
        found.append("thinking")
    if fill_format(tokenizer) is not None:
        found.append("insert")
    if state.vision is not None:
        found.append("vision")
    return found


def _entry(state: ServerState, name: str, ready: Ready | None) -> dict[str, Any]:
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _created(state),
        "size": 0 if ready is None else ready.weight_bytes,
        "digest": hashlib.sha256(f"{name}/{state.fingerprint()}".encode()).hexdigest(),
        "details": _details(ready),
    }


def _details(ready: Ready | None) -> dict[str, Any]:
    kind = "" if ready is None else ready.model_type
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": kind,
        "families": [kind] if kind else [],
        "parameter_size": "",  # not known from what is served
        "quantization_level": "" if ready is None else DTYPES.get(ready.dtype, ready.dtype),
    }


def _created(state: ServerState) -> str:
    return datetime.fromtimestamp(state.created, UTC).isoformat().replace("+00:00", "Z")
