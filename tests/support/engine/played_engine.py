"""An engine that a test plays: its ends of the channels to one EngineClient."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from runtime.ipc.channel import Receiver, Sender
from runtime.ipc.client import ClientNotifier, EngineAddress, EngineClient, Mailbox
from runtime.messages import (
    FromEngine,
    Hello,
    Ready,
    RequestOutput,
    SamplingParams,
    StepOutput,
    ToEngine,
)
from runtime.stats import Stats

PARAMS = SamplingParams(max_tokens=16)
POLL_SECONDS, LIMIT_POLLS = 0.01, 3000


def ready(epoch: int = 0) -> Ready:
    return Ready(epoch, "qwen3", "cpu", "float32", "mha", 97, 64, 16, 8, 4, 32, 1000, 2000, 0.5)


@dataclass
class PlayedEngine:
    """The engine's ends of the channels; `read` waits for messages without blocking the loop."""

    receiver: Receiver[ToEngine]
    sender: Sender[FromEngine]
    notifier: ClientNotifier

    def step(self, *outputs: RequestOutput) -> None:
        self.sender.send(StepOutput(list(outputs), Stats(steps=1)))

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]:
        """The messages that have come, without greetings."""
        messages = self.receiver.receive(timeout_seconds)
        return [message for message in messages if not isinstance(message, Hello)]

    async def read(self, count: int) -> list[ToEngine]:
        got: list[ToEngine] = []
        for _ in range(LIMIT_POLLS):
            got += self.receive()
            if len(got) >= count:
                return got
            await asyncio.sleep(POLL_SECONDS)
        raise AssertionError(f"{len(got)} of {count} messages came")


def addresses(folder: Path) -> EngineAddress:
    return EngineAddress(f"ipc://{folder}/engine", f"ipc://{folder}/api-2")


async def until(condition: object) -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    for _ in range(LIMIT_POLLS):
        if condition():
            return
        await asyncio.sleep(POLL_SECONDS)
    raise AssertionError("the condition did not come true")


async def serve(engine: PlayedEngine, client: EngineClient) -> None:
    engine.sender.send(ready())
    await until(lambda: client.ready is not None)


async def get(mailbox: Mailbox) -> RequestOutput:
    return await asyncio.wait_for(mailbox.get(), LIMIT_POLLS * POLL_SECONDS)
