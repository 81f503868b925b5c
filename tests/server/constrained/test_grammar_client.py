"""The process that tries grammars, and what is remembered of its verdicts."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from server.constrained import grammar_client
from server.constrained.grammar_client import GrammarChecker
from server.constrained.grammar_text import Grammar
from server.constrained.grammar_worker import GrammarCheckArgs, GrammarVerdict
from server.errors import RequestError, Unavailable
from server.prompt.tokenizer import ChatTokenizer
from tests.support.server.fake_engine import fake_server, write_tokenizer

VOCABULARY = 512


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def lark(text: str) -> Grammar:
    return Grammar([{"lark_grammar": text}])


def counted(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The grammars that its process tries from now on."""
    tried: list[bytes] = []
    ask = checker._ask

    def count(start: GrammarCheckArgs, line: bytes) -> GrammarVerdict:
        tried.append(line)
        return ask(start, line)

    monkeypatch.setattr(checker, "_ask", count)
    return tried


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
    answer = checker._answer

    def die(process: subprocess.Popen[bytes], line: bytes) -> object:
        if kills:
            process.send_signal(kills.pop())
        return answer(process, line)

    monkeypatch.setattr(checker, "_answer", die)
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
    tried = counted(checker, monkeypatch)
    texts = [f'start: "{letter * 2000}"' for letter in "abc"]
    for text in [*texts, texts[2], texts[1], texts[0]]:
        await checker.check(lark(text), VOCABULARY, tokenizer)
    assert len(tried) == 4, "the first was forgotten, the others were not"
    checker.close()


def test_a_verdict_may_be_looked_up_while_another_one_is_remembered():
    checker = GrammarChecker()
    lookups: list[threading.Thread] = []

    class Text(str):
        def __len__(self) -> int:
            lookups.append(threading.Thread(target=checker._remembered, args=(b"first",)))
            lookups[-1].start()
            lookups[-1].join(0.2)  # it may have to wait until this one is remembered
            return 1

    for digest in (b"first", b"second", b"third"):
        checker._remember(digest, GrammarVerdict(grammar=Text()))
    for lookup in lookups:
        lookup.join(20)
        assert not lookup.is_alive()


async def test_a_refusal_is_remembered(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_client, "WAIT_SECONDS", 300.0)  # of a machine with other work
    checker = GrammarChecker()
    tried = counted(checker, monkeypatch)
    slow = "start: A\nA: /(.*a.{17})/ & /(.*b.{16})/ & ~/(.*c.{15})/"
    for text, words in (("start: gamma", "gamma"), (slow, "longer than 2 s")):
        for _ in range(3):
            with pytest.raises(RequestError, match=words):
                await checker.check(lark(text), VOCABULARY, tokenizer)
    assert len(tried) == 2
    checker.close()


async def test_what_may_be_otherwise_the_next_time_is_not_remembered(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
):
    checker = GrammarChecker()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_client, "WAIT_SECONDS", 0.0)
        with pytest.raises(RequestError, match="try again"):
            await checker.check(lark('start: "beta"'), VOCABULARY, tokenizer)
    assert "beta" in await checker.check(lark('start: "beta"'), VOCABULARY, tokenizer)
    checker.close()


def test_the_grammar_of_a_client_that_has_gone_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def ask(self: GrammarChecker, start: object, line: bytes) -> GrammarVerdict:
        tried.append(json.loads(line)["grammars"][0]["lark_grammar"])
        begun.set()
        go_on.wait(20)
        return GrammarVerdict(error="refused")

    monkeypatch.setattr(GrammarChecker, "_ask", ask)

    def body(name: str) -> bytes:
        form = {"structured_outputs": {"regex": name}}
        return json.dumps({"model": "fake", "prompt": "x", **form}).encode()

    with fake_server(tmp_path) as fake:
        url = urlsplit(fake.url)

        def ask_for(name: str) -> socket.socket:
            opened = fake.closing(socket.create_connection((url.hostname, url.port), timeout=20))
            opened.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n"
                b"content-type: application/json\r\n\r\n%b" % (len(body(name)), body(name))
            )
            return opened

        first = ask_for("first")
        assert begun.wait(20)
        gone, last = ask_for("gone"), ask_for("last")
        metrics = ""
        gone.close()
        while 'code="499"' not in metrics:
            metrics = httpx.get(f"{fake.url}/metrics").text
        go_on.set()
        assert b" 400 " in first.recv(4096) and b" 400 " in last.recv(4096)
    assert tried == ["start: /first/", "start: /last/"]
