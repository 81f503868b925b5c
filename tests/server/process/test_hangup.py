"""SIGHUP: the file of API keys is read again."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

import httpx2 as httpx

from tests.support.server.launched_server import LaunchedServer, Start, serving


def status(launched: LaunchedServer, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{launched.url}/v1/models", headers=headers).status_code


def test_keys_are_read_again_and_a_wrong_file_changes_nothing(start: Start, tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("old\nkept\n")
    launched = serving(start, api_workers=2, STUB_KEYS=str(file))

    def answers(key: str, code: int) -> bool:
        return all(status(launched, key) == code for _ in range(8))

    def log_has(text: str) -> bool:
        return text in launched.log.read_text()

    assert answers("old", 200) and answers("new", 401)
    file.write_text("alice new\nkept under another name kept\n")
    launched.process.send_signal(signal.SIGHUP)
    launched.wait_until(lambda: answers("new", 200))
    assert answers("old", 401) and answers("kept", 200)
    assert log_has("SIGHUP: API keys read again: 2 in all, 1 new, 1 removed")
    file.write_text("\n")
    launched.process.send_signal(signal.SIGHUP)
    launched.wait_until(lambda: log_has(f"as they were: --api-key-file {file}: it holds no key"))
    file.unlink()
    launched.process.send_signal(signal.SIGHUP)
    launched.wait_until(lambda: log_has(f"{file}: No such file"))
    assert answers("new", 200) and answers("kept", 200)
    first = launched.child("server.process.api_process")
    first.kill()  # the next one has the new keys, too
    first.wait(5)
    launched.wait_until(lambda: answers("new", 200) and answers("old", 401))


def test_without_a_file_of_keys_the_server_goes_on_and_says_so(start: Start):
    launched = serving(start)
    launched.process.send_signal(signal.SIGHUP)
    launched.wait_until(lambda: "there is no --api-key-file" in launched.log.read_text())
    assert launched.status() == 200


def test_a_server_whose_terminal_is_closed_stops(start: Start):
    terminal, stdin = pty.openpty()
    launched = serving(start, stdin=stdin)
    os.close(stdin)
    os.close(terminal)
    launched.process.send_signal(signal.SIGHUP)
    assert launched.process.wait(10) == 0
