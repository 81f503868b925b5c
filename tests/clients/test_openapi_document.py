"""Requests made up from our own OpenAPI document, right and wrong ones: nothing breaks or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeServer, fake_server
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")
specs = pytest.importorskip("schemathesis.specs.openapi.checks")

CHECKS = [
    checks.not_a_server_error,
    specs.status_code_conformance,
    specs.content_type_conformance,
    specs.response_schema_conformance,
    specs.negative_data_rejection,
]
SECONDS = 10  # in which every request must be answered


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_server(tmp_path_factory.mktemp("openapi")) as fake:
        yield fake


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_an_answer_is_one_that_the_document_names(fake: FakeServer, mode: Any):
    document = schemathesis.openapi.from_url(f"{fake.url}/openapi.json")
    positive = mode is schemathesis.GenerationMode.POSITIVE
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:
        # Any text at all is a right one in a path.
        if positive or operation.body or operation.query:
            try_out(operation.as_strategy(generation_mode=mode), positive)


def try_out(cases: Any, positive: bool) -> None:
    @settings(
        max_examples=25,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def answered(case: Any) -> None:
        if positive and isinstance(case.body, dict) and case.body.get("model"):
            case.body["model"] = "fake"  # any other is not found, and there the request would end
        case.call_and_validate(checks=CHECKS, timeout=SECONDS)

    answered()
