"""The conversation: its turns, and the commands that change, show or save it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from server.cli.chat.answer import Answer, AnswerStats, Message
from server.cli.chat.client import ChatServer, ChatServerError
from server.cli.chat.image import ImageError, image_part
from server.cli.terminal import DIM, RED, styled

# Name -> its argument, and what it does.
COMMANDS = {
    "/help": ("", "this list"),
    "/reset": ("", "start over; the instructions stay"),
    "/system": ("TEXT", "start over with these instructions, or with none"),
    "/think": ("on|off", "ask for reasoning, or for none, where a model has both"),
    "/image": ("FILE", "send an image (a file or URL) with the next message"),
    "/stats": ("", "tokens and times of the last answer and of all"),
    "/save": ("FILE", "write it down: as JSON if FILE ends in .json, else as text"),
    "/exit": ("", "end, as Ctrl-D does"),
}
KEYS = 'Ctrl-C ends an answer; """ begins and ends a message of several lines'


def help_text() -> str:
    lines = [f"  {f'{name} {word}':<18} {what}" for name, (word, what) in COMMANDS.items()]
    return "\n".join([*lines, f"  {KEYS}"])


@dataclass
class Session:
    """One conversation with one model.

    read   asks for the result of a tool call; raises EOFError at the end of the input
    """

    server: ChatServer
    model: str
    read: Callable[[str], str]
    options: Message = field(default_factory=dict[str, Any])  # of every request
    system: str = ""
    turns: list[Message] = field(default_factory=list[Message])
    answers: list[AnswerStats] = field(default_factory=list[AnswerStats])
    failed: bool = False  # one answer at least
    _images: list[Message] = field(default_factory=list[Message])

    def take(self, text: str) -> bool:
        """A command, or a message for the model.  False: the conversation is over."""
        word, _, rest = text.partition(" ")
        if not text:
            return True
        if not word.startswith("/"):
            self._say(text)
            return True
        if word == "/exit":
            return False
        if word not in COMMANDS:
            print(f"{word} is not a command here:\n{help_text()}")
            return True
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(help_text()),
            "/reset": lambda _: self._start_over(),
            "/system": self._set_system,
            "/think": self._think,
            "/image": self._add_image,
            "/stats": lambda _: print(self.stats()),
            "/save": self._save,
        }
        commands[word](rest.strip())
        return True

    def _start_over(self) -> None:
        self.turns, self._images = [], []

    def _set_system(self, text: str) -> None:
        self.system = text
        self._start_over()

    def _think(self, word: str) -> None:
        if word not in ("on", "off"):
            print("/think on or /think off")
            return
        self.options["chat_template_kwargs"] = {"enable_thinking": word == "on"}

    def _add_image(self, name: str) -> None:
        """Find out at once whether the model takes it, before a question is typed."""
        if not name:
            print("/image FILE: name a file")
            return
        try:
            part = image_part(name)
            message = {"role": "user", "content": [part, {"type": "text", "text": "?"}]}
            self.server.accepts({"model": self.model, "messages": [message]})
        except ImageError as error:
            _complain(str(error))
        except ChatServerError as error:
            _complain(f"{self.model} does not take this image: {error}")
        else:
            self._images.append(part)
            print(f"{name} goes with your next message")

    def stats(self) -> str:
        if not self.answers:
            return "no answer yet"
        total = AnswerStats()
        for answer in self.answers:
            total.prompt_tokens += answer.prompt_tokens
            total.cached_tokens += answer.cached_tokens
            total.output_tokens += answer.output_tokens
            total.seconds += answer.seconds
        return (
            f"last  {self.answers[-1].text()}\n"
            f"all   {total.prompt_tokens:,} prompt tokens ({total.cached_tokens:,} cached), "
            f"{total.output_tokens:,} output, {len(self.answers)} answers, {total.seconds:.1f} s"
        )

    def _save(self, name: str) -> None:
        if not name:
            print("/save FILE: name a file")
            return
        path = Path(name).expanduser()
        messages = self._messages()
        text = json.dumps({"model": self.model, "messages": messages}, ensure_ascii=False, indent=2)
        if path.suffix != ".json":
            text = "\n\n".join(f"## {each['role']}\n\n{_plain(each)}" for each in messages)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            _complain(f"{name} exists: give another name")
        except OSError as error:
            _complain(f"{name}: {error.strerror}: give a file that you may write")
        else:
            print(f"saved {len(messages)} messages in {name}")

    def _messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def _say(self, text: str) -> None:
        """Send a message and print the answer; if it fails, it is as if it had not been sent."""
        before, content = len(self.turns), cast(Any, text)
        if self._images:
            content = [*self._images, {"type": "text", "text": text}]
        self._images = []
        self.turns.append({"role": "user", "content": content})
        while (answer := self._answer()) is not None:
            self.turns.append(answer.message())
            if not answer.calls or answer.stats.finish == "":
                return
            if not self._take_results(answer):
                break
        del self.turns[before:]

    def _answer(self) -> Answer | None:
        """Print an answer as it comes; None if it failed."""
        answer = Answer()
        body = {"model": self.model, **self.options, "messages": self._messages()}
        try:
            for chunk in self.server.stream(body):
                answer.feed(chunk)
        except ChatServerError as error:
            _complain(str(error))
            self.failed = True
            return None
        except KeyboardInterrupt:  # enough of this answer; what came stays in the context
            answer.stats.finish, answer.calls = "", {}
        print()
        self.answers.append(answer.stats)
        return answer

    def _take_results(self, answer: Answer) -> bool:
        """Ask for what the tools return; False if one returns nothing."""
        for index in sorted(answer.calls):
            call = answer.calls[index]
            name = call[call["type"]]["name"]
            try:
                result = self.read(f"{name} returns> ")
            except EOFError:
                result = ""
            if not result:
                print("no result: this turn is forgotten")
                return False
            self.turns.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return True


def _complain(message: str) -> None:
    print(styled(f"error: {message}", RED, sys.stderr), file=sys.stderr)


def _plain(message: Message) -> str:
    """A message for a person to read."""
    content = message["content"]
    if isinstance(content, list):
        parts = cast("list[Message]", content)
        content = "\n".join(part.get("text") or "(an image)" for part in parts)
    calls = (
        f"(calls {json.dumps(call[call['type']], ensure_ascii=False)})"
        for call in message.get("tool_calls") or ()
    )
    return "\n".join(filter(None, [str(content), *calls]))


def banner(model: str, at: str) -> str:
    hint = styled("/help lists the commands, Ctrl-D ends", DIM, sys.stdout)
    return f"{model} at {at}\n{hint}"
