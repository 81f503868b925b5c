"""Reads an unsupported config.json as if it were a supported model's, and notes what does not fit.

What a model type knows is what its reader in `model_zoo/config.py` asks for, so that there is no
list of fields to keep up to date.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from model_zoo.config import ModelConfig, read_as
from model_zoo.json_fields import Fields, MissingField, ModelError

# For a field that is needed and missing: a number that fits all others of this value.
STAND_IN = 64
MAX_NUMBER = 2**32  # no size is larger; PyTorch could not make tensors of it, even on "meta"
ROUNDS = 64  # each mends one field; no reader asks for so many
# The text model's config in that of a model that also sees or hears.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
TIED = "tie_word_embeddings"  # where it is in both, the outer one decides
# Read from other files, too, or judged by others than the readers of model types.
LEFT_OUT = ("eos_token_id",)


class _Asked(dict[str, Any]):
    """A dict that notes the keys that it is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)


@dataclass(slots=True)
class Reading:
    """An unsupported config.json as one supported model type reads it."""

    model_type: str
    # With other values for the fields that do not fit; None: these could not be mended.
    config: ModelConfig | None = None
    missing: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # `rope_scaling.rope_type` for a nested one
    asked: set[str] = field(default_factory=set)


def text_fields(fields: Fields) -> tuple[Fields, str]:
    """-> (the fields of the text model, the name of the object that they are nested in, or "")."""
    for name in TEXT_CONFIGS:
        value = fields.get(name)
        if isinstance(value, dict) and value:
            tied = {TIED: fields.get(TIED)} if fields.get(TIED) is not None else {}
            return Fields(fields.path, {**value, **tied}), name
    return fields, ""


def read(fields: Fields, model_type: str) -> Reading:
    """Each field that is missing or wrong is noted, and left out or replaced; then again."""
    reading = Reading(model_type)
    values = _Asked({n: _bounded(v) for n, v in fields.values.items() if n not in LEFT_OUT})
    stand_ins: set[str] = set()
    # No folder has this path, so that generation_config.json is not read.
    nowhere = fields.path / "config.json"
    for _ in range(ROUNDS):
        try:
            reading.config = read_as(Fields(nowhere, values), model_type, "bfloat16")
            break
        except ModelError as error:
            name = error.field.partition(".")[0]
            if not name or name in stand_ins:
                break
            if dict.get(values, name) is not None:
                reading.refused.append(error.field)
                del values[name]
                continue
            if isinstance(error, MissingField) and dict.get(fields.values, name) is None:
                reading.missing.append(name)
            values[name] = STAND_IN
            stand_ins.add(name)
    reading.asked = values.keys_asked
    return reading


def _bounded(value: Any) -> Any:
    return STAND_IN if isinstance(value, int) and value > MAX_NUMBER else value
