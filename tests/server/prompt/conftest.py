"""Fixtures of tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.prompt.tokenizer import ChatTokenizer
from tests.support.server.fake_engine import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> ChatTokenizer:
    tokenizer = ChatTokenizer.load(folder)
    tokenizer.tokenizer.add_tokens(["a word with spaces", "w\u00f6rd"])
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer.load(folder)
