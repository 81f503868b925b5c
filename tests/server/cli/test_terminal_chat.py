"""`wavefill chat` against a server: what it says, remembers and forgets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server.fake_engine import GREETING, FakeServer, fake_server
from tests.support.server.server_process import free_port


def chat(url: str, *lines: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "wavefill", "chat", "--base-url", url, *words],
        input="".join(f"{line}\n" for line in lines),
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )


def prompts(fake: FakeServer) -> list[str]:
    """What the engine was asked, with the marks of the template."""
    decode = fake.tokenizer.decode
    return [decode(request.tokens, skip_special=False) for request in fake.engine.requests]


def test_the_answer_is_printed_and_the_next_turn_remembers_it(fake: FakeServer):
    done = chat(fake.url, "Hello", "and now?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(GREETING) == 2
    first, second = prompts(fake)
    assert first == "<|user|>Hello<|end|><|assistant|>"
    assert second.startswith(f"<|user|>Hello<|end|><|assistant|>{GREETING}<|end|><|user|>and now?")


def test_reset_forgets_and_system_stays(fake: FakeServer):
    chat(fake.url, "one", "/system Be brief.", "two", "/reset", "three", "/exit", "four")
    system = "<|system|>Be brief.<|end|>"
    assert prompts(fake) == [
        "<|user|>one<|end|><|assistant|>",
        f"{system}<|user|>two<|end|><|assistant|>",
        f"{system}<|user|>three<|end|><|assistant|>",
    ]


def test_an_unknown_command_is_reported_and_not_sent(fake: FakeServer):
    done = chat(fake.url, "/save this")
    assert "/save is not a command here" in done.stdout
    assert fake.engine.requests == []


def test_the_address_may_have_the_version_and_the_option_a_short_name(fake: FakeServer):
    done = chat("http://127.0.0.1:1", "Hello", words=("--url", f"{fake.url}/v1"))
    assert GREETING in done.stdout, done.stderr


def test_a_failed_turn_is_reported_and_dropped_from_the_history(fake: FakeServer):
    fake.engine.fail_after = 0
    done = chat(fake.url, "one", "two")
    assert done.stderr.count("a seeded fault") == 2
    assert prompts(fake)[1] == "<|user|>two<|end|><|assistant|>"


def test_a_key_that_is_missing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WAVEFILL_API_KEY", raising=False)
    with fake_server(tmp_path, api_keys=("k",)) as server:
        done = chat(server.url, "Hello")
        assert done.returncode == 1 and "set WAVEFILL_API_KEY" in done.stderr
        monkeypatch.setenv("WAVEFILL_API_KEY", "k")
        assert GREETING in chat(server.url, "Hello").stdout


def test_a_server_that_is_not_there_is_one_line_and_code_1():
    done = chat(f"http://127.0.0.1:{free_port()}", "Hello")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: 127.0.0.1:")
    assert line.endswith(": Connection refused: start the server, or give --base-url")


def test_a_model_that_is_not_served_is_reported_before_a_question_is_typed(fake: FakeServer):
    done = chat(fake.url, "Hello", words=("--model", "other"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --model other: the server has fake, alias\n"
    assert fake.engine.requests == []
