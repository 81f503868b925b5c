"""How many examples a property test tries: a quarter in `make test`, all in `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

FULL = "full"  # the hypothesis profile in which all are tried; tests/conftest.py registers it
T = TypeVar("T", bound=Callable[..., Any])


def examples(count: int, **options: Any) -> Callable[[T], T]:
    """Settings of a test that @given drives, without a deadline; it stands above @given.

    count    of examples under the profile `full`, which `make test-slow` chooses for these tests
    options  other arguments of hypothesis.settings
    """
    tried = count if settings.get_current_profile_name() == FULL else max(count // 4, 10)

    def decorate(test: T) -> T:
        return pytest.mark.examples(settings(max_examples=tried, deadline=None, **options)(test))

    return decorate
