"""GraphStep: one step on static buffers, so that a CUDA graph can hold all of it.

    prepare     tokens, positions, slot mappings, page tables (prepare.py); stores the sampling
                parameters of new sequences in their slots
    plan        of the attention back end, from the lengths on the device
    model       hidden states and logits of each row's last token
    sample      tokens of the unconstrained rows, into their slots and the host's memory

Everything that differs from step to step is read on the device, where the host has copied it before
(buffers.py).  Tests call the same function on a CPU, with interpreted kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.backend import Backend
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from model_zoo.inputs import ModelInput
from runtime.cuda_graph import prepare
from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.cuda_graph.buffers import Layout, StepBuffers
from runtime.executor.image_buffers import StepImageBuffers
from runtime.executor.protocols import ModelProtocol
from runtime.executor.slots import SlotTables
from runtime.sampling.kernels.sample import sample
from runtime.sampling.state import SamplerState


@dataclass(frozen=True, slots=True)
class StepTensors:
    """hidden, logits [R, vocab], padding included.  Valid until the next step.

    hidden  [R, hidden] of each row's last token; [T, hidden] of all tokens if requested
    """

    hidden: Tensor
    logits: Tensor


class GraphStep:
    """The buffers of the largest step; smaller steps use views of them."""

    def __init__(
        self,
        model: ModelProtocol,
        *,
        kv: KVPool,
        backend: Backend,
        slots: SlotTables,
        sampler: SamplerState,
        buffers: StepBuffers,
        buckets: Buckets,
        position_deltas: Tensor | None = None,
        images: StepImageBuffers | None = None,
    ) -> None:
        """Of models that read images: position_deltas, as in prepare.py; images: of a step"""
        self._model = model
        self.kv = kv
        self._backend, self._slots = backend, slots
        self._position_deltas, self._images = position_deltas, images
        self._sampler, self._buffers, self._block = sampler, buffers, buffers.block
        max_tokens = max(bucket.tokens for bucket in buckets.largest)
        max_rows = max(bucket.rows for bucket in buckets.largest)

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=buffers.block.device)

        self._tokens, self._positions = numbers(max_tokens), numbers(max_tokens)
        self._ends = numbers(max_rows)
        groups, _, max_pages = slots.page_tables.shape
        # Those of each group begin at multiples of 16 bytes, for which kernels are compiled.
        self._slot_mappings = numbers(groups, _even(max_tokens, 2))
        self._row_pages = numbers(groups, _even(max_rows, 4), max_pages, dtype=torch.int32)

    @torch.inference_mode()
    def run(self, bucket: Bucket, *, all_hidden_states: bool = False) -> StepTensors:
        """Run the step whose block, and with images their buffers, are on the device.

        all_hidden_states: of all its tokens
        """
        layout = self._buffers.layout(bucket)
        inp, ends = self._input(layout), self._ends[: bucket.rows]
        prepare.prepare(
            self._block,
            self._slots.page_tables,
            self._slots.last_token,
            self._sampler.rows,
            stride=layout.stride,
            new_rows_at=layout.new_rows_at,
            num_new_rows=layout.num_new_rows,
            tokens_at=layout.tokens_at,
            pages_at=layout.pages_at,
            tokens=inp.tokens,
            positions=inp.positions,
            slot_mappings=self._slot_mappings,
            logit_rows=ends,
            row_pages=self._row_pages[:, : bucket.rows],
            page_size=self.kv.page_size,
            position_deltas=self._position_deltas,
        )
        meta = self._backend.plan(inp.meta, self.kv)
        one_token = bucket.row_tokens == 1  # every token is the last of its row
        alone = None if one_token or all_hidden_states else ends
        hidden = self._model(replace(inp, meta=meta, ends=alone))
        of_rows = hidden if one_token or not all_hidden_states else hidden.index_select(0, ends)
        logits = self._model.logits(of_rows)
        sample(
            logits,
            layout.column(self._block, prepare.SAMPLE_SLOT, bucket.rows),
            inp.meta.cache_seqlens,  # the sampled token's position follows the stored ones
            self._sampler,
            self._slots.last_token,
            *self._buffers.outputs(bucket.rows),
            layout.output(self._block),
        )
        return StepTensors(hidden, logits)

    def _input(self, layout: Layout) -> ModelInput:
        """The model's input as views of the buffers.  Host lengths are the bucket's, not a step's:
        a mixed one has rows of all kinds, so that the back end prepares for all."""
        bucket = layout.bucket
        tokens, rows, decode, _ = bucket
        meta = AttentionMetadata(
            cu_seqlens_q=layout.column(self._block, prepare.CU_Q, rows + 1),
            cache_seqlens=layout.column(self._block, prepare.KV_LEN, rows),
            page_tables=tuple(pages[:rows] for pages in self._row_pages),
            slot_mappings=tuple(mapping[:tokens] for mapping in self._slot_mappings),
            max_seqlen_q=bucket.row_tokens,
            decode_rows=rows if bucket.row_tokens == 1 else 0,
            q_lens=(bucket.row_tokens if decode else 0,) * rows,
            kv_lens=(0,) * rows,
        )
        if self.kv.states is not None:
            meta = self._with_states(meta, layout)
        images = None
        if bucket.images:
            assert self._images is not None, "the model reads images"
            images = self._images.of_step(tokens)
        return ModelInput(
            tokens=self._tokens[:tokens],
            positions=self._positions[:tokens],
            ends=None,
            meta=meta,
            kv=self.kv,
            backend=self._backend,
            images=images,
        )

    def _with_states(self, meta: AttentionMetadata, layout: Layout) -> AttentionMetadata:
        """For a model with recurrent states: which one each row has, and where copies go."""
        columns = prepare.STATE_SLOT, prepare.SNAPSHOT_AT, prepare.SNAPSHOT_STATE
        slots, positions, states = (
            layout.column(self._block, column, layout.bucket.rows) for column in columns
        )
        snapshots = None if layout.bucket.decode else (positions, states)
        return replace(meta, state_slots=slots, state_snapshots=snapshots)


def _even(count: int, multiple: int) -> int:
    """Rounded up to a multiple."""
    return -(-count // multiple) * multiple
