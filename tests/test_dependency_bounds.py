"""The constraints of `make test-versions` are versions that pyproject.toml allows."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from tests.support.dependency_bounds import constraints, requirements

ALLOWED = {Requirement(line).name: Requirement(line).specifier for line in requirements()}


def pinned(which: str, torch: str | None = None) -> dict[str, str]:
    lines = [Requirement(line) for line in constraints(which, torch)]
    return {line.name: next(iter(line.specifier)).version for line in lines}


def test_oldest_pins_every_dependency_to_a_version_that_is_allowed():
    oldest = pinned("oldest")
    assert set(oldest) == set(ALLOWED) and {"torch", "fastapi", "opentelemetry-sdk"} <= set(oldest)
    assert all(version in ALLOWED[name] for name, version in oldest.items())


def test_newest_pins_nothing():
    assert pinned("newest") == {}


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_another_torch_brings_its_own_triton(which: str):
    chosen = pinned(which, "2.12.1")
    assert chosen["torch"] == "2.12.1" and "triton" not in chosen
