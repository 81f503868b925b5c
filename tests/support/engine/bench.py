"""Bench: an engine on the strict fake model, its requests, and the outputs that it has sent."""

from __future__ import annotations

from typing import Any

from runtime.config import ResolvedConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, RequestOutput, SamplingParams
from runtime.scheduler.batch import Batch
from tests.support.engine.fake_grammar_process import VOCAB_SIZE
from tests.support.engine.fake_model import FakeExecutor, plain_decoding


def resolved(
    *,
    page_size: int = 4,
    num_pages: int = 64,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 32,
    max_model_len: int = 64,
    prefix_cache: bool = True,
    num_speculative_tokens: int = 0,
    group_windows: tuple[int, ...] = (0,),
    num_states: int = 0,
    num_snapshots: int = 0,
    snapshot_every: int = 8,
) -> ResolvedConfig:
    """A configuration as small as a test wants it."""
    return ResolvedConfig(
        model="fake",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        load_format="dummy",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        page_size=page_size,
        num_pages=num_pages,
        prefix_cache=prefix_cache,
        threads=1,
        seed=0,
        num_speculative_tokens=num_speculative_tokens,
        group_windows=group_windows,
        num_states=num_states,
        num_snapshots=num_snapshots,
        snapshot_every=snapshot_every,
    )


def request(
    id: int,
    tokens: list[int],
    *,
    max_tokens: int = 4,
    priority: int = 0,
    salt: bytes = b"",
    client: int = 0,
    **params: Any,
) -> EngineRequest:
    return EngineRequest(
        id, client, tokens, SamplingParams(max_tokens=max_tokens, **params), priority, salt
    )


class Bench:
    """An engine on the fake executor, and what it has said."""

    def __init__(self, *, overlap: bool = True, **config: Any) -> None:
        self.config = resolved(**config)
        self.executor = FakeExecutor(self.config, overlap=overlap)
        self.engine = Engine(self.config, VOCAB_SIZE, self.executor)
        self.outputs: list[RequestOutput] = []

    @property
    def batches(self) -> list[Batch]:
        return self.executor.batches

    def add(self, *requests: EngineRequest) -> None:
        for one in requests:
            self.engine.add(one)

    def step(self, count: int = 1) -> list[RequestOutput]:
        """The Outputs of the last of `count` steps."""
        new: list[RequestOutput] = []
        for _ in range(count):
            new = self.engine.step()
            self.outputs += new
            self.engine.requests.check_integrity()
        return new

    def run(self, *requests: EngineRequest) -> None:
        """Everything until there is nothing left to do."""
        self.add(*requests)
        for _ in range(2000):
            if self.engine.idle:
                assert self.engine.stats().pages_used == 0
                return
            self.step()
        raise AssertionError("no end in sight")

    def tokens(self, id: int) -> list[int]:
        return [token for output in self.of(id) for token in output.tokens]

    def of(self, id: int) -> list[RequestOutput]:
        return [output for output in self.outputs if output.id == id]

    def end(self, id: int) -> RequestOutput:
        ends = [output for output in self.of(id) if output.finish is not None]
        assert len(ends) == 1 and self.of(id)[-1] is ends[0]
        return ends[0]

    def plain(self, one: EngineRequest) -> list[int]:
        return plain_decoding(one.tokens, one.params, max_model_len=self.config.max_model_len)[0]
