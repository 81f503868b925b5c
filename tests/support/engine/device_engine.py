"""An engine with a real model and runner for random workloads, and a fake grammar."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attention.backend import Capacity, Shape
from attention.dispatch import choose
from attention.kv_groups import kv_layout
from attention.kv_pool import KVPool
from model_zoo.config import ModelConfig, read_config
from model_zoo.model import Model
from runtime.config import ResolvedConfig
from runtime.cuda_graph.executor import GraphExecutor
from runtime.engine.loop import Engine
from runtime.executor.images import RowImages
from runtime.executor.torch_executor import TorchExecutor
from runtime.grammar.manager import GrammarManager, GrammarUpdates
from runtime.messages import EngineRequest
from runtime.scheduler.batch import Masks
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import junk_states

POISON = 130  # a token whose embedding is no number: only the request that computes it fails


@cache
def poisoned_model(checkpoint: Path, device: torch.device) -> tuple[ModelConfig, Model]:
    """The checkpoint in float32, but for POISON's embedding."""
    config = read_config(checkpoint)
    assert config.vocab_size > POISON and not config.tie_embeddings
    model = load_model(config, checkpoint, dtype=torch.float32, device=device)
    with torch.no_grad():
        model.get_submodule("embedding").get_parameter("weight")[POISON] = torch.nan
    return config, model


def sizes(
    *,
    slots: int,
    budget: int,
    pages: int,
    page_size: int,
    max_len: int,
    prefix_cache: bool,
    group_windows: tuple[int, ...] = (0,),
    states: int = 0,
    snapshots: int = 0,
) -> ResolvedConfig:
    return ResolvedConfig(
        model="", device="cpu", dtype="float32", kv_dtype="float32", attention="",
        load_format="auto", max_model_len=max_len, max_num_seqs=slots, max_batched_tokens=budget,
        page_size=page_size, num_pages=pages, prefix_cache=prefix_cache, threads=1, seed=0,
        group_windows=group_windows, num_states=states, num_snapshots=snapshots,
    )  # fmt: skip


def device_engine(
    checkpoint: Path, device: torch.device, resolved: ResolvedConfig, *, graph_steps: bool
) -> tuple[Engine, TorchExecutor | GraphExecutor]:
    """As engine_of(), on the poisoned model, with late masks."""
    config, model = poisoned_model(checkpoint, device)
    grammars: Any = FitRules(config.vocab_size)
    return engine_of(config, model, device, resolved, graph_steps=graph_steps, grammars=grammars)


def engine_of(
    config: ModelConfig,
    model: Model,
    device: torch.device,
    resolved: ResolvedConfig,
    *,
    graph_steps: bool,
    dtype: torch.dtype = torch.float32,
    grammars: GrammarManager | None = None,
    images: RowImages | None = None,
) -> tuple[Engine, TorchExecutor | GraphExecutor]:
    """With kernels and whole steps, or in plain torch; keys and values begin as no numbers."""
    shape = Shape(
        heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        page_size=resolved.page_size, dtype=dtype, kv_dtype=dtype,
    )  # fmt: skip
    layout = kv_layout(config.attention_specs, resolved.max_model_len)
    assert layout.windows == resolved.group_windows
    kv = KVPool.allocate(
        layers=layout, pages=resolved.num_pages, kv_heads=config.num_kv_heads,
        page_size=resolved.page_size, head_dim=config.head_dim, dtype=dtype,
        device=device, states=junk_states(config, resolved.num_states, dtype, device),
    )  # fmt: skip
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    capacity = Capacity(rows=resolved.max_num_seqs, tokens=resolved.max_batched_tokens)
    runner = (GraphExecutor if graph_steps else TorchExecutor)(
        model,
        resolved=resolved,
        vocab_size=config.vocab_size,
        kv=kv,
        backend=choose(
            device,
            "flash2" if graph_steps else "mha",
            shape,
            capacity,
            windows=tuple({spec.window for spec in config.attention_specs}),
        ),
        device=device,
        images=images,
    )
    runner.overlap = graph_steps  # interpreted ones, too: what is under way is read a step later
    return Engine(resolved, config.vocab_size, runner, grammars=grammars), runner


class FitRules:
    """Stands for the GrammarManager.

    The grammar "N" allows N tokens, of which no neighbours are equal modulo 3.  The tokens that N
    allows first are those that N does not divide.  Some masks are late.
    """

    compiling = False

    def __init__(self, vocab_size: int) -> None:
        self._tokens = np.arange(vocab_size)
        self._begun: list[tuple[EngineRequest, str | None, bool]] = []
        self._said: dict[int, list[int]] = {}
        self._most: dict[int, int] = {}
        self._ended: list[int] = []
        self._delays: dict[int, int] = {}  # calls of settle() until the mask is arrived
        self._draw = random.Random(vocab_size)
        self.late: set[int] = set()

    @property
    def live(self) -> Container[int]:
        return self._said

    def submit(self, request: EngineRequest) -> None:
        self._begun.append((request, None, False))
        self._said[request.id], self._most[request.id] = [], int(request.params.grammar)
        self.compiling = True

    def take_compiled(self, wait_seconds: float) -> list[tuple[EngineRequest, str | None, bool]]:
        begun, self._begun, self.compiling = self._begun, [], False
        return begun

    def release(self, request_id: int) -> bool:
        waiting = [entry for entry in self._begun if entry[0].id == request_id]
        self._begun = [entry for entry in self._begun if entry[0].id != request_id]
        self.compiling = bool(self._begun)
        self._said.pop(request_id, None)
        self._delays.pop(request_id, None)
        self.late.discard(request_id)
        return bool(waiting)

    def advance(self, tokens: list[tuple[int, list[int]]]) -> None:
        for id, [token] in tokens:
            if id in self._said:
                assert id not in self._delays, "a token without a mask"
                self._said[id].append(token)
                self._delays[id] = self._draw.choice([0, 0, 0, 0, 1, 2, 3, 9])
                if len(self._said[id]) == self._most[id]:
                    self._ended.append(id)

    def poll(self, ids: Iterable[int] = ()) -> GrammarUpdates:
        self._delays = {id: left - 1 for id, left in self._delays.items() if left}
        arrived = {id for id in self.late if id not in self._delays}
        late = {id for id in ids if id in self._delays}
        self.late = (self.late - arrived) | late
        ended = [id for id in self._ended if id not in self._delays]
        self._ended = [id for id in self._ended if id in self._delays]
        return GrammarUpdates(ended, {}, {}, late, arrived)

    def masks(self, rows: Iterable[tuple[int, int]]) -> Masks | None:
        found = [
            (row, self._mask(id)) for row, id in rows if id in self._said and id not in self._delays
        ]
        if not found:
            return None
        return Masks([row for row, _ in found], b"".join(mask for _, mask in found))

    def _mask(self, id: int) -> bytes:
        said = self._said[id]
        wrong = self._tokens % 3 == said[-1] % 3 if said else self._tokens % self._most[id] == 0
        return np.packbits(~wrong, bitorder="little").tobytes()
