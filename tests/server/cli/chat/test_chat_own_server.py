"""`wavefill chat` with a server of its own: started where none runs, stopped at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from server.cli.chat import own_server
from server.cli.chat.client import ChatServerError
from server.cli.chat.own_server import OwnServer
from server.cli.commands import chat
from server.cli.main import Parser
from tests.support.cli.pseudo_terminal import pseudo_terminal
from tests.support.server.fake_engine import FakeServer
from tests.support.server.tiny_chat_tools import TOOLS, WEATHER

WAVEFILL = Path(sys.executable).parent / "wavefill"
COMMAND = (WAVEFILL, "chat", "tiny-chat", "--device", "cpu", "--threads", "1", "--kv-tokens", "8k")


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process], seconds: float = 20) -> None:
    _, alive = psutil.wait_procs(processes, seconds)
    assert alive == []


def test_on_a_terminal_it_has_history_and_completion_and_ends_with_its_server(tmp_path: Path):
    with pseudo_terminal(COMMAND, XDG_STATE_HOME=str(tmp_path), HOME=str(tmp_path)) as terminal:
        terminal.wait_for("started for this chat", 60)
        terminal.wait_for("> ")
        children = family(terminal.process.pid)
        assert len(children) >= 3, "a launcher, an engine, an API process"
        terminal.type("What is 12 + 30?\n")
        terminal.wait_for("12 + 30 = 42.\r\n> ")
        terminal.type("/st\t\n")
        terminal.wait_for("last  ")
        terminal.wait_for("\n> ")
        terminal.type("\x1b[A\x1b[A")  # up, up
        terminal.wait_for("What is 12 + 30?")
        terminal.interrupt_until("/exit ends the chat)\r\n> ")
        terminal.type("\x04")
        assert terminal.wait() == 0, terminal.text
    assert_gone(children)
    assert all(len(line) <= 80 for line in terminal.lines), terminal.lines
    history = tmp_path / "wavefill" / "chat_history"
    assert history.read_text().splitlines() == ["What is 12 + 30?", "/stats "]
    assert history.stat().st_mode & 0o777 == 0o600


def test_reasoning_and_calls_are_shown_and_a_result_is_taken(tmp_path: Path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    done = subprocess.run(
        [*COMMAND, "--tools", tools, "--temperature", "0"],
        input=f"{WEATHER}\n18 degrees\n/reset\n/think on\nWhat is 12 + 30?\n",
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r'\[calls get_weather\] \{"city": ?"Paris"\}\n.*18 degrees', done.stdout)
    assert "[reasoning] No tool is needed.\n\n12 + 30 = 42." in done.stdout


@pytest.mark.slow
def test_a_chat_that_is_killed_takes_its_server_with_it():
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while b"started for this chat" not in process.stdout.readline():
            assert process.poll() is None
        children = family(process.pid)
        process.send_signal(signal.SIGKILL)
    assert_gone(children)


def test_a_server_that_cannot_start_says_why_and_nothing_is_left(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    began = time.monotonic()
    said = pytest.raises(ChatServerError, match=r"did not start:\n(.*\n)*.*`model_type` is missing")
    with said, OwnServer([str(tmp_path), "--device", "cpu"]) as own:
        own.start()
    assert time.monotonic() - began < 60
    assert own.stopped


def test_a_server_at_the_default_address_that_has_the_model_is_used(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(chat, "DEFAULT_URL", fake.url)
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    parser = Parser()
    chat.add_arguments(parser)
    assert chat.run(parser.parse_args([])) == 0
    assert capsys.readouterr().out.startswith(f"fake at {fake.url}")
    assert chat.run(parser.parse_args(["--model", "alias"])) == 0
    assert capsys.readouterr().out.startswith(f"alias at {fake.url}")
    assert chat.run(parser.parse_args(["--model", "other"])) == 1
    assert "no server at" in capsys.readouterr().err


def test_another_program_at_the_default_address_is_no_server(monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []

    class Started(OwnServer):
        def start(self):
            started.append(list(self._arguments))
            raise ChatServerError("enough")

    monkeypatch.setattr(chat, "OwnServer", Started)
    parser = Parser()
    chat.add_arguments(parser)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(chat, "DEFAULT_URL", address)
        monkeypatch.setattr(chat, "FIND_SECONDS", 0.1)
        assert chat.run(parser.parse_args(["tiny-chat", "--max-model-len", "1k"])) == 1
    assert started == [["tiny-chat", "--max-model-len", "1024"]]


@pytest.mark.parametrize("status", [401, 503])
def test_a_server_that_asks_for_a_key_or_loads_is_not_joined_by_another(
    fake: FakeServer, status: int, monkeypatch: pytest.MonkeyPatch
):
    class Refusing(chat.ChatServer):
        def models(self, timeout: float = 0):
            raise ChatServerError("not now", status)

    monkeypatch.setattr(chat, "ChatServer", Refusing)
    monkeypatch.setattr(chat, "OwnServer", None)
    parser = Parser()
    chat.add_arguments(parser)
    assert chat.run(parser.parse_args([])) == 1


def test_its_server_has_a_key_that_others_do_not_know():
    keys = {OwnServer([])._key for _ in range(3)}
    assert len(keys) == 3 and all(len(key) >= 32 for key in keys)
    assert own_server.KEY not in os.environ
