"""Runs a model over shuffled pages, in steps of any size, without an engine."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from attention.backend import Backend
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from attention.reference import ReferenceBackend
from attention.state_pool import StatePool
from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput, StepImages
from model_zoo.layers.delta_net.pool import allocate_states

PAGE = 16


def junk_states(
    config: ModelConfig, states: int, dtype: torch.dtype, device: torch.device
) -> StatePool | None:
    """Recurrent states, if the model has some, that are no numbers."""
    if config.delta_net is None:
        return None
    pool = allocate_states(
        config.delta_net, states, dtype=dtype, state_dtype=torch.float32, device=device
    )
    pool.conv.fill_(torch.nan)
    pool.matrix.fill_(torch.nan)
    return pool


class PagedRow:
    """One sequence with its own pages; `backend` attends, by default the reference."""

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        backend: Backend | None = None,
    ) -> None:
        self.model = model
        pages = -(-config.max_position // PAGE)
        self.kv = KVPool.allocate(
            layers=len(config.attention_layers),
            pages=pages,
            kv_heads=config.num_kv_heads,
            page_size=PAGE,
            head_dim=config.head_dim,
            dtype=dtype,
            device=torch.device(device),
            states=junk_states(config, 3, dtype, torch.device(device)),
        )
        self.kv.k.fill_(float("nan"))
        self.kv.v.fill_(float("nan"))
        self.state = torch.tensor([1], dtype=torch.int32, device=device)
        self.table = torch.randperm(pages, dtype=torch.int32)[None].to(device)
        self.backend = backend or ReferenceBackend()
        self.device = device
        self.length = 0

    @torch.inference_mode()
    def feed(
        self,
        tokens: Tensor,
        *,
        only_last: bool = False,
        images: StepImages | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute tokens [T] after those of earlier calls -> logits [T, vocab], or [1, vocab].

        positions [T]: of the rope, if they are not the tokens' places
        """
        count, end = len(tokens), self.length + len(tokens)
        places = torch.arange(self.length, end, device=self.device)
        slots = self.table[0, places // PAGE].long() * PAGE + places % PAGE
        meta = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=self.device),
            cache_seqlens=torch.tensor([end], dtype=torch.int32, device=self.device),
            page_tables=(self.table,),
            slot_mappings=(slots,),
            max_seqlen_q=count,
            decode_rows=int(count == 1),
            q_lens=(count,),
            kv_lens=(end,),
            state_slots=self.state,
        )
        inp = ModelInput(
            tokens=tokens,
            positions=places if positions is None else positions,
            ends=meta.cu_seqlens_q[1:].long() - 1 if only_last else None,
            meta=self.backend.plan(meta, self.kv),
            kv=self.kv,
            backend=self.backend,
            images=images,
        )
        self.length = end
        return self.model.logits(self.model(inp))  # type: ignore[operator]

    def feed_in_steps(self, tokens: Tensor, cuts: list[int]) -> Tensor:
        """As feed(), cut before each index of `cuts`."""
        edges = [0, *cuts, len(tokens)]
        return torch.cat([self.feed(tokens[begin:end]) for begin, end in pairwise(edges)])
