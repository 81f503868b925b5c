"""The chunks of a choice, joined to its whole answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.generation.answer_text import ScoredToken
from server.generation.choice import ChatFinish, Choice, Chunk
from server.tool_calls.parser.deltas import ContentDelta, ReasoningDelta


@dataclass
class GeneratedToolCall:
    id: str
    name: str
    texts: list[str]  # joined once: appending to one text would copy it for every token
    custom: bool = False

    @property
    def arguments(self) -> str:
        """JSON text, or the input of a custom tool."""
        return "".join(self.texts)


@dataclass
class GeneratedAnswer:
    """All of a choice: the sink of its chunks."""

    choice: Choice
    contents: list[str] = field(default_factory=list[str])
    reasoning_chunks: list[str] = field(default_factory=list[str])
    tool_calls: list[GeneratedToolCall] = field(default_factory=list["GeneratedToolCall"])
    scored: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish: ChatFinish = "stop"
    tokens: list[int] = field(default_factory=list[int])

    @property
    def content(self) -> str:
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_chunks)

    def put(self, chunk: Chunk) -> bool:
        for delta in chunk.deltas:
            if isinstance(delta, ContentDelta):
                self.contents.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self.reasoning_chunks.append(delta.text)
            elif delta.id is not None:
                name = delta.name or ""
                call = GeneratedToolCall(delta.id, name, [delta.arguments], delta.custom)
                self.tool_calls.append(call)
            else:
                self.tool_calls[delta.index].texts.append(delta.arguments)
        self.scored += chunk.scored
        self.tokens += chunk.tokens
        self.finish = chunk.finish or self.finish
        return True

    async def room(self) -> None:
        """There always is."""
