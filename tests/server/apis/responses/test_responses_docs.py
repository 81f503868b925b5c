"""docs/api.md has every field of /v1/responses."""

from __future__ import annotations

import re

from server.apis.responses.database import Limits
from server.apis.responses.schema import RESPONSES_UNSUPPORTED, ResponsesRequest
from tests.support.paths import ROOT

DOCS = (ROOT / "docs" / "api.md").read_text("utf-8")
SECTION = DOCS.partition("\n## Responses\n")[2].partition("\n## ")[0]
TABLE = [line for line in SECTION.partition("\n\nRefused")[0].splitlines() if line[:3] == "| `"]


def test_every_field_has_a_row_and_every_row_a_field():
    listed = [name for row in TABLE for name in re.findall(r"`([a-z_]+)`", row.split(" | ")[0])]
    assert sorted(listed) == sorted(ResponsesRequest.model_fields)


def test_every_refused_field_is_named():
    refused = SECTION.partition("Refused by name")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`([a-z_]+)`", refused)) == sorted(RESPONSES_UNSUPPORTED)


def test_the_documented_limits_are_those_of_the_store():
    text = " ".join(SECTION.split())  # wherever its lines end
    assert Limits() == (256 << 20, 100_000, 30 * 86400)
    assert "(256m), 100000 responses" in text and "(30) after its last use" in text
