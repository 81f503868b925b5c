"""docs/api.md says of each parameter what the schemas say."""

from __future__ import annotations

import re

import pytest

from server.apis.openai.chat_schema import CHAT_UNSUPPORTED, ChatRequest
from server.apis.openai.completions_schema import COMPLETION_UNSUPPORTED, CompletionRequest
from server.apis.openai.sampling_schema import StreamOptions
from server.app import HTTP_ERRORS, create_app
from server.config import ServerConfig
from server.http.validation import Body, Unsupported
from server.state import ServerState
from tests.support.paths import ROOT

DOCS = (ROOT / "docs" / "api.md").read_text("utf-8")
NAME = re.compile(r"`([a-z_]+)`")
ROUTES: dict[str, tuple[type[Body], dict[str, Unsupported]]] = {
    "chat": (ChatRequest, CHAT_UNSUPPORTED),
    "completions": (CompletionRequest, COMPLETION_UNSUPPORTED),
}


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each Markdown table as its rows, by the words of its head."""
    found: list[list[dict[str, str]]] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            head = []
        elif not head:
            head = cells
            found.append([])
        elif not all(set(cell) <= {"-", ":"} and cell for cell in cells):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


PARAMETERS = next(table for table in tables(DOCS) if "range (default)" in table[0])
REFUSED = next(table for table in tables(DOCS) if "instead" in table[0])


def named(table: list[dict[str, str]], route: str, mark: str) -> list[str]:
    for row in table:
        assert row[route] in ("", mark), row
    return [name for row in table if row[route] for name in NAME.findall(row["parameter"])]


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_has_a_row_and_every_row_a_field(route: str):
    listed = named(PARAMETERS, route, "yes")
    assert len(listed) == len(set(listed))
    assert sorted(listed) == sorted(ROUTES[route][0].model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_every_refused_parameter_is_listed_and_refused(route: str):
    model, unsupported = ROUTES[route]
    listed = named(REFUSED, route, "refused")
    assert len(listed) == len(set(listed))
    assert sorted(listed) == sorted(unsupported)
    assert not set(listed) & set(model.model_fields)


def test_every_row_applies_to_an_endpoint():
    for row in PARAMETERS + REFUSED:
        assert row["chat"] or row["completions"], row
        assert NAME.findall(row["parameter"]), row


def test_the_options_of_a_stream_are_named():
    [row] = [row for row in PARAMETERS if row["parameter"] == "`stream_options`"]
    assert set(NAME.findall(row["range (default)"])) == set(StreamOptions.model_fields)


def test_the_defaults_and_limits_told_are_those_of_the_schema():
    schema = CompletionRequest.model_json_schema()["properties"]
    limits = {
        name: next(option for option in field["anyOf"] if option["type"] != "null")
        for name, field in schema.items()
        if "anyOf" in field and all("type" in option for option in field["anyOf"])
    }
    told = {
        "n": ("minimum", "maximum"),
        "temperature": ("minimum", "maximum"),
        "min_p": ("minimum", "maximum"),
        "presence_penalty": ("minimum", "maximum"),
        "repetition_penalty": ("minimum", "maximum"),
        "prompt_logprobs": ("minimum", "maximum"),
        "allowed_token_ids": ("minItems", "maxItems"),
        "bad_words": ("maxItems",),
        "stop_token_ids": ("maxItems",),
        "best_of": ("maximum",),
    }
    rows = {name: row for row in PARAMETERS for name in NAME.findall(row["parameter"])}
    for name, keys in told.items():
        numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", rows[name]["range (default)"])]
        for key in keys:
            assert limits[name][key] in numbers, (name, key)


def test_the_codes_of_wrong_routes_are_told():
    assert f"`{HTTP_ERRORS[404]}`" in DOCS


def test_every_route_is_told():
    state = ServerState(ServerConfig(), None, None, None)  # type: ignore[arg-type]
    names = {"{name}": "{id}", "{file_id}": "{id}", "{batch_id}": "{id}"}
    for path in create_app(state).openapi()["paths"]:
        told = path
        for own, common in names.items():
            told = told.replace(own, common)
        # Those of one kind are listed behind each other, the first one in full.
        short = told.removeprefix("/v1/responses").removeprefix("/v1")
        assert f"`{told}`" in DOCS or f" {told}`" in DOCS or f"`{short}`" in DOCS, path
