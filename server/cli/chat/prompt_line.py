"""The line that a person types: editing, history and completion by readline, several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
HISTORY_LINES = 1000


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "wavefill" / "chat_history"


class PromptLine:
    """Reads what is typed.  On a terminal with readline: editing, history, completion by Tab."""

    def __init__(self, commands: Iterable[str], history: Path | None = None) -> None:
        self._commands = tuple(commands)
        self._history = history or history_file()
        self._matches: list[str] = []
        # Elsewhere a prompt would only stand between the answers.
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def __enter__(self) -> PromptLine:
        if self._terminal:
            with contextlib.suppress(ImportError):
                self._set_up()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._terminal:
            return
        with contextlib.suppress(ImportError, OSError):  # a chat is not worth an error for this
            import readline

            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.set_history_length(HISTORY_LINES)
            with open(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600), "a"):
                pass  # it holds what was typed: for this user alone
            readline.write_history_file(self._history)

    def _set_up(self) -> None:
        import readline

        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        edit = "libedit" in (readline.__doc__ or "")  # of macOS
        readline.parse_and_bind("bind ^I rl_complete" if edit else "tab: complete")

    def read(self, prompt: str = PROMPT) -> str:
        """What is typed, over several lines between two \"\"\" or after a \\ at the end of one.

        Raises EOFError at the end of the input.
        """
        shown = prompt if self._terminal else ""
        text = input(shown)
        if text.lstrip().startswith(QUOTES):
            return self._until_quotes(text.lstrip()[len(QUOTES) :])
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{self._more()}"
        return text.strip()

    def _until_quotes(self, text: str) -> str:
        while QUOTES not in text:
            text += f"\n{self._more()}"
        return text.partition(QUOTES)[0].strip("\n")

    def _more(self) -> str:
        return input(MORE if self._terminal else "")

    def _complete(self, word: str, state: int) -> str | None:
        import readline

        if state == 0:
            first = readline.get_begidx() == 0
            self._matches = self._commands_like(word) if first else paths_like(word)
        return self._matches[state] if state < len(self._matches) else None

    def _commands_like(self, word: str) -> list[str]:
        return [f"{name} " for name in self._commands if word and name.startswith(word)]


def paths_like(word: str) -> list[str]:
    """Files and folders that begin so, folders with a slash."""
    folder, _, start = word.rpartition("/")
    at = Path(f"{folder}/" if "/" in word else ".").expanduser()
    try:
        entries = sorted(at.iterdir())
    except OSError:
        return []
    before = f"{folder}/" if "/" in word else ""
    return [
        f"{before}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(start) and (start or not entry.name.startswith("."))
    ]
