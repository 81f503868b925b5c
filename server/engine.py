"""Engine: what an API process needs of the engine, whether EngineClient or a test's script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from runtime.ipc.client import Mailbox
from runtime.messages import Progress, PromptImage, Ready, SamplingParams
from runtime.snapshot import Snapshot
from runtime.stats import Stats

EngineState = Literal[
    "loading",  # it starts, for the first time or again
    "ready",
    "stalled",  # it should answer, and is silent
    "down",  # it has ended
]


class OneEngine(Protocol):
    """One of the engines; see runtime.ipc.connection.EngineConnection."""

    @property
    def index(self) -> int: ...
    @property
    def ready(self) -> Ready | None: ...
    @property
    def progress(self) -> Progress | None: ...
    @property
    def down(self) -> str | None: ...
    @property
    def stats(self) -> Stats: ...
    def stalled(self) -> float: ...


class Engine(Protocol):
    """All engines, of which each has the whole model; see runtime.ipc.client.EngineClient."""

    @property
    def engines(self) -> Sequence[OneEngine]: ...
    @property
    def ready(self) -> Ready | None: ...
    @property
    def progress(self) -> Progress | None: ...
    @property
    def down(self) -> str | None: ...
    @property
    def stats(self) -> Stats: ...

    @property
    def index(self) -> int: ...

    on_snapshot: Callable[[int, Snapshot], None] | None

    @property
    def pending(self) -> int: ...
    def unhealthy(self) -> str | None: ...
    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        images: tuple[PromptImage, ...] = (),
        generation_prompt_len: int = 0,
    ) -> Mailbox: ...
    def sent_together(self) -> AbstractContextManager[None]: ...
    def abort(self, id: int) -> None: ...
    def observe(self, share: bytes, *, watching: bool, engine: int = 0) -> None: ...
    def close(self) -> None: ...


def engine_state(engine: OneEngine) -> EngineState:
    if engine.ready is not None:
        return "stalled" if engine.stalled() else "ready"
    # The next engine reports its progress while it loads; there is none before the first report.
    return "down" if engine.down is not None and engine.progress is None else "loading"


def serving_state(engines: Engine) -> EngineState:
    """Of all together: that of the engine that is nearest to answering."""
    states = {engine_state(engine) for engine in engines.engines}
    order: tuple[EngineState, ...] = ("ready", "stalled", "loading", "down")
    return next(state for state in order if state in states)
