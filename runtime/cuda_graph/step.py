"""GraphStep: one step on static buffers, so that a CUDA graph can hold all of it.

    prepare     tokens, positions, write slots, page tables (kernels/prepare.py); what new sequences
                say of sampling moves into their slots
    plan        of the attention back end, from the lengths on the device
    model       hidden states and logits of each row's last token
    sample      tokens of the rows that want nothing special, into their slots and the results

Everything that differs from step to step is read on the device: the host sends it beforehand
(step_buffers.py).  On a CPU, with interpreted kernels, the same function is called by tests.
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
from runtime.cuda_graph.input_block import Layout
from runtime.cuda_graph.output_ring import OutputRing
from runtime.executor.inputs import ModelProtocol
from runtime.executor.slots import SequenceSlots
from runtime.sampling.kernels.sample import sample
from runtime.sampling.state import SamplerState


@dataclass(frozen=True, slots=True)
class StepTensors:
    """hidden, logits [R, vocab], padding included.  Valid until the next step.

    hidden  [R, hidden] of each row's last token; [T, hidden] of all, if the step was asked for them
    """

    hidden: Tensor
    logits: Tensor


class GraphStep:
    """The buffers of the largest step, and the step itself on their first parts."""

    def __init__(
        self,
        model: ModelProtocol,
        *,
        kv: KVPool,
        backend: Backend,
        slots: SequenceSlots,
        sampler: SamplerState,
        block: Tensor,
        buckets: Buckets,
    ) -> None:
        """block: what StepBuffers copy to."""
        self._model = model
        self.kv = kv
        self._backend, self._slots = backend, slots
        self._sampler, self._block = sampler, block
        max_tokens = max(bucket.tokens for bucket in buckets.largest)
        max_rows = max(bucket.rows for bucket in buckets.largest)

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=block.device)

        self._tokens, self._positions = numbers(max_tokens), numbers(max_tokens)
        self._slot_mapping, self._ends = numbers(max_tokens), numbers(max_rows)
        max_pages = slots.page_table.shape[1]
        self._row_pages = numbers(max_rows, max_pages, dtype=torch.int32)
        self.results = OutputRing(max_rows, block.device)

    @torch.inference_mode()
    def run(self, bucket: Bucket, *, all_hidden_states: bool = False) -> StepTensors:
        """Run the step whose block is on the device.  all_hidden_states: of all its tokens."""
        layout = Layout.of(bucket)
        inp, ends = self._input(layout), self._ends[: bucket.rows]
        prepare.prepare(
            self._block,
            self._slots.page_table,
            self._slots.last_token,
            self._sampler.rows,
            stride=layout.stride,
            new_rows_at=layout.new_rows_at,
            num_new_rows=layout.num_new_rows,
            tokens_at=layout.tokens_at,
            pages_at=layout.pages_at,
            tokens=inp.tokens,
            positions=inp.positions,
            slot_mapping=inp.meta.slot_mapping,
            logit_rows=ends,
            row_pages=inp.meta.page_table,
            page_size=self.kv.page_size,
        )
        meta = self._backend.plan(inp.meta, self.kv)
        # The last tokens of rows that all decode are all tokens.
        alone = None if bucket.decode or all_hidden_states else ends
        hidden = self._model(replace(inp, meta=meta, ends=alone))
        of_rows = hidden if bucket.decode or not all_hidden_states else hidden.index_select(0, ends)
        logits = self._model.logits(of_rows)
        sample(
            logits,
            layout.column(self._block, prepare.SAMPLE_SLOT, bucket.rows),
            inp.meta.cache_seqlens,  # a row's next token takes the place behind what it has stored
            self._sampler,
            self._slots.last_token,
            *self.results.outputs(bucket.rows),
        )
        return StepTensors(hidden, logits)

    def _input(self, layout: Layout) -> ModelInput:
        """What the model reads.  Lengths on the host are those of no step, but of the bucket: a
        mixed one has rows of all kinds, so that the back end is ready for all."""
        tokens, rows, decode = layout.bucket
        meta = AttentionMetadata(
            cu_seqlens_q=layout.column(self._block, prepare.CU_Q, rows + 1),
            cache_seqlens=layout.column(self._block, prepare.KV_LEN, rows),
            page_table=self._row_pages[:rows],
            slot_mapping=self._slot_mapping[:tokens],
            max_seqlen_q=1 if decode else tokens,
            decode_rows=rows if decode else 0,
            q_lens=(1,) * rows if decode else (0,) * rows,
            kv_lens=(0,) * rows,
        )
        return ModelInput(
            tokens=self._tokens[:tokens],
            positions=self._positions[:tokens],
            ends=None,
            meta=meta,
            kv=self.kv,
            backend=self._backend,
        )
