"""A chat's content takes few forms between HTTP and the engine."""

from __future__ import annotations

from pathlib import Path

from tests.support.server.trace_forms import ASKED, SAID, traced

MOST = 5  # forms in each direction


async def test_a_streamed_chat_with_tools_takes_few_forms(tmp_path: Path) -> None:
    sent, received, events = await traced(tmp_path)
    assert b"tool_calls" in events and all(word.encode() in events for word in SAID)
    assert not any(word.encode() in events for word in ASKED)
    assert sent.keys() >= {"ChatRequest", "SamplingParams", "EngineRequest"}, "it is not traced"
    assert received.keys() >= {"StepOutput", "RequestOutput", "Delta"}, "it is not traced"
    assert len(sent) <= MOST, list(sent)
    assert len(received) <= MOST, list(received)
