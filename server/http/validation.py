"""The JSON of a body -> a pydantic model, or a RequestError that names the field."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticKnownError

from server.errors import (
    FieldPath,
    MissingParameter,
    RequestError,
    UnknownParameter,
    UnsupportedParameter,
)

MAX_FIELDS = 128  # of one object
MAX_MESSAGES = 16384  # of one conversation
MAX_NAME = 64  # characters of a field's name in a message
WRONG_KIND = "wrong_kind"  # error type of a union whose message is what it takes
TAG = "~"  # union tags begin with it, so that they can be left out of a field's path


class Body(BaseModel):
    """Base of every request body: nothing is converted, nothing unknown is let through."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        # pydantic makes a record of every wrong field: a million of them would hold the server up.
        return few_entries(MAX_FIELDS)(value)


def few_entries(limit: int) -> Callable[[object], object]:
    """A validator of the number of an object's fields, before any other."""

    def check(value: object) -> object:
        size = len(fields_of(value))
        if size > limit:
            context = {"field_type": "Object", "max_length": limit, "actual_length": size}
            raise PydanticKnownError("too_long", context)
        return value

    return check


B = TypeVar("B", bound=Body)

# What clients add to an answer and send back with it: no part of the conversation, kept nowhere.
Note = Annotated[Any, Field(exclude=True)]


def tagged_union(tag: Callable[[object], str | None], message: str) -> Discriminator:
    """Of a union: the tag of the class that a value is read as.  `message` is what it takes."""
    return Discriminator(tag, custom_error_type=WRONG_KIND, custom_error_message=message)


def by_kind(message: str, **tags: str) -> Discriminator:
    """Of a union: each kind of JSON is read as the class of its tag."""
    return tagged_union(lambda value: tags.get(kind_of(value)), message)


class Unsupported:
    """A documented field that this server lacks: refused unless its value changes nothing."""

    def __init__(self, remedy: str, *harmless: object) -> None:
        self.remedy = remedy
        self.harmless = harmless

    def is_noop(self, value: object) -> bool:
        # type() as well: 1 == True in Python, in JSON they are two things.
        return value is None or any(value == h and type(value) is type(h) for h in self.harmless)


def items_of(value: object) -> list[Any]:
    """The items of a JSON array; none of anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def fields_of(value: object) -> dict[str, Any]:
    """The fields of a JSON object; none of anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def parse(
    model: type[B], fields: dict[str, Any], unsupported: Mapping[str, Unsupported] | None = None
) -> B:
    """Validate a parsed body.  Raises RequestError with the path of the first wrong field."""
    for name, entry in (unsupported or {}).items():
        if name in fields and entry.is_noop(fields[name]):
            fields = {key: value for key, value in fields.items() if key != name}
        elif name in fields:
            raise UnsupportedParameter(
                "{} is not supported by this server: {}", (FieldPath(name), entry.remedy)
            )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _field_error(model, error.errors(include_url=False)[0]) from None


def path_of(location: Sequence[str | int]) -> FieldPath:
    """The field of a pydantic error."""
    steps = [step[:MAX_NAME] if isinstance(step, str) else step for step in location]
    return FieldPath(*(step for step in steps if not str(step).startswith(TAG) and step != "[key]"))


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
LENGTHS = {
    "too_long": ("max_length", "at most", "entries"),
    "too_short": ("min_length", "at least", "entries"),
    "string_too_long": ("max_length", "at most", "characters"),
    "string_too_short": ("min_length", "at least", "characters"),
}

NAMES = r"^[a-zA-Z0-9_-]+$"  # patterns of names
NAMES_WITH_DOTS = r"^[a-zA-Z0-9_.-]+$"
PATTERNS = {NAMES: "a-z, A-Z, 0-9, _ and -", NAMES_WITH_DOTS: "a-z, A-Z, 0-9, _, . and -"}


def _field_error(model: type[Body], error: ErrorDetails) -> RequestError:
    path = path_of(error["loc"])
    kind, value = error["type"], error["input"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind == "missing":
        return MissingParameter("{} is required: add it", path)
    if kind == "extra_forbidden":
        return _unknown(model, path)
    if kind == WRONG_KIND and (found := fields_of(value).get("type")) is not None:
        template = "{} must be {}, not an object whose type is {}"
        return RequestError(template, (path, error["msg"], _short_json(found)), code="invalid_type")
    if kind in EXPECTED or kind == WRONG_KIND:
        expected = EXPECTED.get(kind, error["msg"])
        if kind == "int_type" and _is_large(value):
            expected += " of at most 64 bits"
        return RequestError(
            "{} must be {}, not {}", (path, expected, _short_json(value)), code="invalid_type"
        )
    if kind in LIMITS:
        key, words = LIMITS[kind]
        limit = context[key] if isinstance(context[key], int) else f"{context[key]:g}"
        return RequestError("{} is {}: it must be {} {}", (path, _short_json(value), words, limit))
    if kind in LENGTHS:
        key, words, unit = LENGTHS[kind]
        size = f"{len(value)} {unit}"
        return RequestError(
            "{} has {}: send {} {}", (path or "the body", size, words, context[key])
        )
    if kind == "literal_error":
        return RequestError(
            "{} is {}: it must be {}", (path, _short_json(value), context["expected"])
        )
    if kind == "string_pattern_mismatch":
        words = PATTERNS.get(context["pattern"], f"what fits {context['pattern']}")
        template = "{} is {}: it may have only {}; rename it"
        return RequestError(template, (path, _short_json(value), words))
    if kind == "finite_number":
        return RequestError("{} must be a finite number", path)
    return RequestError("{}: {}", (path, error["msg"]))


def _unknown(model: type[Body], path: FieldPath) -> UnknownParameter:
    close = difflib.get_close_matches(str(path[-1]), model.model_fields, n=1, cutoff=0.75)
    remedy = f"did you mean `{close[0]}`?" if close else "remove it"
    return UnknownParameter("{} is not a parameter of this route: {}", (path, remedy))


def _is_large(value: object) -> bool:
    """Whether it may be an integer that was read as a float, because 64 bits do not hold it."""
    return isinstance(value, float) and abs(value) >= 2.0**63


def _short_json(value: object) -> str:
    """A value short enough for a message."""
    if isinstance(value, bool | int | float | str):
        text = orjson.dumps(value).decode() if not isinstance(value, int) else str(value).lower()
        return text if len(text) <= 60 else f"a {kind_of(value)} of {len(text)} characters"
    return "null" if value is None else f"an {kind_of(value)}"
