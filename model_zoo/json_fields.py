"""Typed access to the fields of a Hugging Face JSON file, with errors that name file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REQUIRED = object()
MAX_SHOWN = 40  # characters of a value in a message


class ModelError(ValueError):
    """The model cannot be served; the message names the file, the problem and the remedy."""

    field = ""  # the one that is missing or wrong, `rope_scaling.factor`; empty: it is no field


class MissingField(ModelError):
    """A field that is needed and not there."""


class UnsupportedModel(ModelError):
    """A `model_type` that no model here computes; `model_zoo.unsupported` says what is nearest."""

    def __init__(self, fields: Fields, supported: tuple[str, ...]) -> None:
        value, known = shown(fields.get("model_type")), ", ".join(supported)
        super().__init__(f"{fields.path}: `model_type` is {value}: supported: {known}")
        self.fields = fields


class Fields:
    """The JSON object in `path`, or the one nested in it under `prefix`."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Raises ModelError if the file is not a JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{path}: cannot be read as JSON: {error}: download the file again"
            ) from error
        if not isinstance(values, dict):
            raise ModelError(
                f"{path}: a JSON object is expected, found {type(values).__name__}: download the "
                "file again"
            )
        return cls(path, values)

    def error(self, name: str, value: object, supported: str) -> ModelError:
        """The error for a field's value; supported: what is expected instead."""
        error = ModelError(
            f"{self.path}: `{self._prefix}{name}` is {json.dumps(value)}: {supported}"
        )
        error.field = self._prefix + name
        return error

    def get(self, name: str) -> Any:
        """The raw value; None where the field is absent."""
        return self.values.get(name)

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """A positive integer.  Absent or null: the default."""
        value = self._value(name, default)
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, value, "a positive integer is expected")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A positive, finite number.  Absent or null: the default."""
        value = self._value(name, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.error(name, value, "a positive number is expected")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false is expected")
        return value

    def choice(self, name: str, supported: tuple[str, ...], default: Any = _REQUIRED) -> str:
        value = self._value(name, default)
        if value not in supported:
            raise self.error(name, value, "supported: " + ", ".join(supported))
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings.  Absent or null: empty."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(name, value, "a list of strings is expected")
        return tuple(value)

    def nested(self, name: str) -> Fields:
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, value, "a JSON object is expected")
        return Fields(self.path, value, f"{self._prefix}{name}.")

    def overridden(self, values: Mapping[str, Any]) -> Fields:
        """The same object with some fields replaced or added."""
        return Fields(self.path, {**self.values, **values}, self._prefix)

    def refuse(self, name: str, why: str, *, allowed: tuple[object, ...] = (None, False)) -> None:
        """Raise ModelError unless the field has one of the allowed values."""
        value = self.values.get(name)
        if value not in allowed:
            raise self.error(name, value, why)

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            error = MissingField(
                f"{self.path}: `{self._prefix}{name}` is missing: take the file as the model's "
                "repository has it"
            )
            error.field = self._prefix + name
            raise error
        return default


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A value of a file in a message: in one line, without control characters, shortened."""
    text = json.dumps(value)
    return text if len(text) <= limit else text[:limit] + "..."
