"""The process that tries grammars, and what is remembered of its verdicts."""

from __future__ import annotations

import signal
import subprocess

import pytest

from server.constrained import grammar_client
from server.constrained.grammar_client import GrammarChecker
from server.constrained.grammar_text import Grammar
from server.errors import RequestError, Unavailable
from server.prompt.tokenizer import ChatTokenizer
from tests.support.server.fake_engine import write_tokenizer

VOCABULARY = 512


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def lark(text: str) -> Grammar:
    return Grammar([{"lark_grammar": text}])


async def test_a_process_that_started_too_slowly_gives_no_verdict_on_the_next_grammar(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
):
    checker = GrammarChecker()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_client, "START_SECONDS", 0.0)
        with pytest.raises(Unavailable):
            await checker.check(lark('start: "a"'), VOCABULARY, tokenizer)
    assert "beta" in await checker.check(lark('start: "beta"'), VOCABULARY, tokenizer)
    with pytest.raises(RequestError, match="gamma"):
        await checker.check(lark("start: gamma"), VOCABULARY, tokenizer)
    checker.close()


async def test_a_grammar_whose_process_is_killed_is_tried_by_another_one(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
):
    checker, kills = GrammarChecker(), [signal.SIGKILL]
    verdict = checker._verdict

    def die(process: subprocess.Popen[bytes], line: bytes) -> object:
        if kills:
            process.send_signal(kills.pop())
        return verdict(process, line)

    monkeypatch.setattr(checker, "_verdict", die)
    assert "alpha" in await checker.check(lark('start: "alpha"'), VOCABULARY, tokenizer)
    kills += [signal.SIGKILL, signal.SIGTERM]
    with pytest.raises(Unavailable) as lost:
        await checker.check(lark('start: "beta"'), VOCABULARY, tokenizer)
    assert lost.value.status == 503 and lost.value.retry_after_s
    kills += [signal.SIGSEGV]
    with pytest.raises(RequestError, match="too complex") as refused:
        await checker.check(lark('start: "beta"'), VOCABULARY, tokenizer)
    assert refused.value.status == 400
    checker.close()


async def test_large_grammars_are_not_all_remembered(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar_client, "MAX_REMEMBERED_CHARS", 5000)
    checker = GrammarChecker()
    tried: list[bytes] = []
    ask = checker._ask

    def count(start: object, line: bytes) -> object:
        tried.append(line)
        return ask(start, line)

    monkeypatch.setattr(checker, "_ask", count)
    texts = [f'start: "{letter * 2000}"' for letter in "abc"]
    for text in [*texts, texts[2], texts[1], texts[0]]:
        await checker.check(lark(text), VOCABULARY, tokenizer)
    assert len(tried) == 4, "the first was forgotten, the others were not"
    checker.close()
