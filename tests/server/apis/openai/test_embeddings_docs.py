"""docs/api.md says of embeddings, score and rerank what the schemas say."""

from __future__ import annotations

import re

import pytest

from server.apis.openai.embeddings_schema import (
    MAX_TEXTS,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from server.generation.embeddings import MAX_CONCURRENT, MAX_TOKENS
from server.http.validation import Body
from tests.support.paths import ROOT

DOCS = (ROOT / "docs" / "api.md").read_text("utf-8")
SECTION = DOCS.split("## Embeddings\n")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in SECTION.splitlines()
    if line.startswith("| `")
]
ROUTES: dict[str, tuple[int, type[Body]]] = {
    "embeddings": (2, EmbeddingRequest),
    "score": (3, ScoreRequest),
    "rerank": (4, RerankRequest),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_a_route_has_a_row_and_every_row_a_field(route: str):
    column, model = ROUTES[route]
    listed = [
        name for row in ROWS if row[column] == "yes" for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert sorted(listed) == sorted(model.model_fields)


def test_the_limits_told_are_those_of_the_code():
    text = " ".join(SECTION.split())  # wherever its lines end
    assert f"up to {MAX_TEXTS}" in text
    assert f"at most {MAX_CONCURRENT}" in text
    assert f"{MAX_TOKENS:,} tokens" in text
