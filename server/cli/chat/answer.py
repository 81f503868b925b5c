"""One answer as it comes: what is printed of it, what the next turn needs, and its figures."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

from server.cli.terminal import CYAN, DIM, has_colour, styled

Message = dict[str, Any]


@dataclass
class AnswerStats:
    """Figures of one answer, as this client saw it.  The counts are the server's; 0: not said."""

    seconds: float = 0.0
    first_token: float | None = None  # seconds after the request was sent
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    finish: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None where there is no other."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / max(self.seconds - self.first_token, 1e-9)

    def text(self) -> str:
        """Two lines."""
        reasoning = f" ({self.reasoning_tokens:,} of reasoning)" if self.reasoning_tokens else ""
        times = [f"{self.seconds:.1f} s", f"ended by {self.finish or 'you'}"]
        if self.tokens_per_second is not None:
            times.insert(0, f"{self.tokens_per_second:,.1f} tokens/s")
        if self.first_token is not None:
            times.insert(0, f"first token {self.first_token * 1000:,.0f} ms")
        return (
            f"{self.prompt_tokens:,} prompt tokens ({self.cached_tokens:,} cached), "
            f"{self.output_tokens:,} output{reasoning}\n      {', '.join(times)}"
        )


@dataclass
class Answer:
    """Prints the chunks of one answer: reasoning dim, tool calls by name with their arguments."""

    content: str = ""
    calls: dict[int, Message] = field(default_factory=dict[int, Message])
    stats: AnswerStats = field(default_factory=AnswerStats)
    _began: float = field(default_factory=time.monotonic)
    _part: str = ""  # what is being printed: reasoning, content or a call

    def feed(self, chunk: Message) -> None:
        usage = chunk.get("usage")
        if usage:
            self._count(usage)
        for choice in chunk["choices"]:
            self.stats.finish = choice.get("finish_reason") or self.stats.finish
            self._feed_delta(cast(Message, choice["delta"]))
        self.stats.seconds = time.monotonic() - self._began

    def _feed_delta(self, delta: Message) -> None:
        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
        if reasoning:
            self._begin("reasoning")
            self._print(styled(reasoning, DIM, sys.stdout))
        if text := delta.get("content"):
            self._begin("content")
            self.content += text
            self._print(text)
        for call in delta.get("tool_calls") or ():
            self._feed_call(call)

    def _feed_call(self, delta: Message) -> None:
        index = delta.get("index") or 0
        kind = "custom" if "custom" in delta else "function"
        part = cast(Message, delta.get(kind) or {})
        words = "input" if kind == "custom" else "arguments"
        if index not in self.calls:
            name = part.get("name") or ""
            called = {"name": name, words: ""}
            self.calls[index] = {"id": delta.get("id") or "", "type": kind, kind: called}
            self._begin(f"call {index}")
            self._print(styled(f"[calls {name}] ", CYAN, sys.stdout))
        added = part.get(words) or ""
        call = self.calls[index]
        if kind == call["type"]:
            call[kind][words] += added
        self._print(added)

    def _begin(self, part: str) -> None:
        """Separate what comes from what was printed before."""
        if self.stats.first_token is None:
            self.stats.first_token = time.monotonic() - self._began
        if part == self._part:
            return
        if self._part:
            self._print("\n" if self._part != "reasoning" or part != "content" else "\n\n")
        if part == "reasoning" and not has_colour(sys.stdout):
            self._print("[reasoning] ")
        self._part = part

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)

    def _count(self, usage: Message) -> None:
        prompt = cast(Message, usage.get("prompt_tokens_details") or {})
        output = cast(Message, usage.get("completion_tokens_details") or {})
        self.stats.prompt_tokens = usage.get("prompt_tokens") or 0
        self.stats.cached_tokens = prompt.get("cached_tokens") or 0
        self.stats.output_tokens = usage.get("completion_tokens") or 0
        self.stats.reasoning_tokens = output.get("reasoning_tokens") or 0

    def message(self) -> Message:
        """The message of the assistant for the next turn; reasoning is not sent back."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message
