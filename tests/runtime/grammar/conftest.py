"""Fixtures of a tokenizer and a grammar process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.grammar.manager import GrammarManager
from tests.support.engine.grammar_engine import Texts
from tests.support.server.fake_engine import VOCAB


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def grammars(texts: Texts) -> Iterator[GrammarManager]:
    """One grammar process for all engines of this file, as one has no use for two."""
    grammars = GrammarManager(texts.file, VOCAB)
    yield grammars
    grammars.close()
