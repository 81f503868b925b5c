"""The message for a model type that is not supported."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from model_zoo.json_fields import Fields, UnsupportedModel, shown
from model_zoo.unsupported.nearest import Differences, find_nearest, supported_type
from model_zoo.unsupported.reading import text_fields
from model_zoo.unsupported.tensor_names import names_in
from model_zoo.unsupported.topics import TOPICS, topic_of

# What is said of differences, so that the message fits on a screen.
MAX_TOPICS, MAX_FIELDS, MAX_VALUE = 4, 4, 20
MAX_GROUPS, MAX_MODULES, MAX_NAME = 2, 4, 100


def explained(error: Exception) -> str:
    """The message of an error; of an unsupported model, with the nearest one that is supported."""
    if not isinstance(error, UnsupportedModel):
        return str(error)
    text, nested_in = text_fields(error.fields)
    nearest = find_nearest(text, names_in(error.fields.path.parent))
    lines = [
        str(error),
        _nearest_line(nearest, text, nested_in),
        _fields_line(nearest, text),
        *_tensor_lines(nearest),
        _remedy(nearest, text, nested_in),
    ]
    return "\n  ".join(lines)


def _nearest_line(nearest: Differences, text: Fields, nested_in: str) -> str:
    if not nested_in:
        return f"nearest: {nearest.model_type}"
    own = text.get("model_type")
    named = "" if own is None else f", {shown(own)}"
    return f"nearest to its text model (`{nested_in}`{named}): {nearest.model_type}"


def _tensor_lines(nearest: Differences) -> list[str]:
    known, tensors = nearest.model_type, nearest.tensors
    if tensors is None:
        no_config = "config.json cannot be read as of this type"
        why = no_config if nearest.reading.config is None else "no safetensors file can be read"
        return [f"tensors: not compared, because {why}"]
    if not tensors.common:
        return [f"tensors: {known} has none of these names: {_names(tensors.lacked)}"]
    lines: list[str] = []
    if tensors.lacked:
        lines.append(f"tensors that {known} lacks: {_names(tensors.lacked)}")
    if tensors.absent:
        lines.append(f"missing tensors of {known}: {_names(tensors.absent)}")
    return lines or [f"tensors: {known} has the same names"]


def _fields_line(nearest: Differences, text: Fields) -> str:
    if not nearest.fields:
        return f"config.json: no field that {nearest.model_type} does not know"
    ordered = sorted(nearest.fields, key=lambda name: topic_of(name.partition(".")[0]))
    names = list(TOPICS)
    topics = [
        (names[index], list(fields))
        for index, fields in groupby(ordered, lambda name: topic_of(name.partition(".")[0])[0])
    ]
    each = max(1, MAX_FIELDS // len(topics))
    said = [f"{topic} ({_values(fields, text, each)})" for topic, fields in topics[:MAX_TOPICS]]
    others = ", ".join(topic for topic, _ in topics[MAX_TOPICS:])
    return f"config.json differs in {', '.join(said)}" + (f"; also in {others}" if others else "")


def _values(names: list[str], text: Fields, limit: int) -> str:
    said = [_value(name, text) for name in names[:limit]]
    more = len(names) - limit
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def _value(name: str, text: Fields) -> str:
    value: Any = text.values
    for key in [name] if name in text.values else name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    quoted = f"`{_quoted(name, MAX_NAME)}`"
    return f"no {quoted}" if value is None else f"{quoted} {shown(value, MAX_VALUE)}"


def _quoted(name: str, limit: int) -> str:
    return shown(name, limit).replace('"', "")


def _names(names: Iterable[str]) -> str:
    """`a.b.{c,d}.weight`: names that differ in one module are said together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names, key=lambda name: (name.endswith(".bias"), name)):
        module, _, suffix = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        groups.setdefault((parent, suffix), []).append(last)
    said: list[str] = []
    for (parent, suffix), modules in list(groups.items())[:MAX_GROUPS]:
        listed = ",".join(modules[:MAX_MODULES]) + (",..." if len(modules) > MAX_MODULES else "")
        middle = listed if len(modules) == 1 else f"{{{listed}}}"
        whole = ".".join(part for part in (parent, middle, suffix) if part)
        said.append(_quoted(whole, MAX_NAME))
    more = sum(len(modules) for modules in list(groups.values())[MAX_GROUPS:])
    return ", ".join(said) + (f" and {more} more" if more else "")


def _remedy(nearest: Differences, text: Fields, nested_in: str) -> str:
    known, tensors = nearest.model_type, nearest.tensors
    equal = tensors is not None and not (nearest.fields or tensors.lacked or tensors.absent)
    if nested_in and (equal or supported_type(text)):
        return f"remedy: use a repository of the text model alone, a {known}"
    if equal:
        return (
            f'remedy: if it computes the same as {known}, set `model_type` to "{known}" in '
            "config.json; names alone do not say so"
        )
    return (
        "remedy: use a model of a supported type, or add this one, as docs/architecture.md says "
        'under "Where things go"'
    )
