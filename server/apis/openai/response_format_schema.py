"""The fields that request structured output, and the rules between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from server.errors import FieldPath, MissingParameter, RequestError, UnsupportedParameter
from server.http.validation import NAMES, Body, Unsupported, by_kind

MAX_REGEX = 8192  # characters
MAX_GRAMMAR = 65_536
MAX_SCHEMA = 262_144  # bytes of JSON
MAX_CHOICES = 4096

# Fields of other servers; here `structured_outputs` holds all of them.
LEGACY_GUIDED_FIELDS: dict[str, Unsupported] = {
    f"guided_{kind}": Unsupported(f'use `structured_outputs`: {{"{kind}": ...}}')
    for kind in ("json", "regex", "choice", "grammar")
} | {
    "guided_whitespace_pattern": Unsupported("use `structured_outputs.whitespace_pattern`"),
    "guided_decoding_backend": Unsupported("there is one; leave it out"),
    "json_schema": Unsupported("use `response_format`"),
    "regex": Unsupported('use `structured_outputs`: {"regex": ...}'),
    "ebnf": Unsupported('use `structured_outputs`: {"grammar": ...}'),
}


class SchemaFormat(Body):
    name: str = Field(min_length=1, max_length=64, pattern=NAMES)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # see strict_schema, and relaxed_schema without it


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None
    # vLLM's and SGLang's, as in `structured_outputs.structural_tag`.
    structures: Annotated[list[dict[str, Any]], Field(max_length=MAX_CHOICES)] | None = None
    triggers: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None

    def check(self) -> None:
        """Raises RequestError unless there is what the type needs, and nothing else."""
        for name, type in FORMAT_FIELDS.items():
            path = FieldPath("response_format", name)
            is_sent = getattr(self, name) is not None
            if self.type == type and not is_sent:
                raise MissingParameter("{} is required with type {}: add it", (path, type))
            if self.type != type and is_sent:
                raise RequestError(
                    "{} does nothing with type {}: set the type to {} or leave it out",
                    (path, self.type, type),
                )


FORMAT_FIELDS = {
    "json_schema": "json_schema",
    "structures": "structural_tag",
    "triggers": "structural_tag",
}


Schema = Annotated[
    Annotated[dict[str, Any], Tag("~object")]
    | Annotated[str, Field(min_length=2, max_length=MAX_SCHEMA), Tag("~text")],
    by_kind("a JSON Schema, as an object or as a string of JSON", object="~object", string="~text"),
]
Choice = Annotated[str, Field(min_length=1, max_length=16384)]
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(Body):
    """One of CONSTRAINTS, and how JSON may be written."""

    json_: Schema | None = Field(None, alias="json")
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX)] | None = None
    choice: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)] | None = None
    json_object: bool | None = None
    structural_tag: Schema | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def constraints(self) -> list[str]:
        """Names of the constraints that are set."""
        others = {name: getattr(self, name) for name in CONSTRAINTS if name != "json"}
        values = {"json": self.json_} | others
        # An empty object is a schema, too: that of any JSON.
        return [name for name, value in values.items() if value not in (None, False)]

    def check(self) -> None:
        """Raises RequestError unless exactly one constraint is set, with options that fit it."""
        sent = self.constraints()
        if len(sent) != 1:
            found = " and ".join(f"`{name}`" for name in sent) or "none"
            raise RequestError(
                "{structured_outputs} has {}: send exactly one of {}",
                (found, ", ".join(CONSTRAINTS)),
            )
        for option in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, option) and sent[0] not in ("json", "json_object"):
                raise RequestError(
                    "{} is about JSON, it does nothing with `{}`: leave it out",
                    (FieldPath("structured_outputs", option), sent[0]),
                )
        if self.disable_additional_properties and sent[0] != "json":
            raise RequestError(
                "{structured_outputs.disable_additional_properties} needs `json`: leave it out"
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "`disable_any_whitespace` and `whitespace_pattern` exclude each other: send one",
                param=FieldPath("structured_outputs", "whitespace_pattern"),
            )


def check_format(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    allowed_token_ids: list[int] | None,
) -> None:
    """The rules between the fields that limit an answer.  Raises RequestError."""
    if response_format is not None:
        response_format.check()
    if structured_outputs is not None:
        structured_outputs.check()
    formatted = response_format is not None and response_format.type != "text"
    if formatted and structured_outputs is not None:
        raise RequestError(
            "{structured_outputs} and {response_format} exclude each other: send one of them"
        )
    if allowed_token_ids and (formatted or structured_outputs is not None):
        raise allowed_beside("a prescribed form")


def allowed_beside(form: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        "{allowed_token_ids} could leave {} without a next token: send either the token ids or "
        "what asks for the form",
        form,
    )
