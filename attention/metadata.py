"""AttentionMetadata: one step's lengths, page tables and slot mappings, as device tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously, in stream order; on a CPU, return it.

    From pageable memory the host would wait for everything queued before.  The pinned staging
    buffer is PyTorch's caching allocator's, which does not reuse it before the copy is done.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """B rows with T query tokens in all; row b has q_len[b], ending at KV length cache_seqlens[b].

    cu_seqlens_q  [B + 1] int32  prefix sums of q_len
    cache_seqlens [B]     int32  KV length of each row, this step included
    page_tables   of each group (attention/kv_groups.py), [B, max_pages] int32: pages of each row in
                  order; entries past its length, or before the group's window, are junk
    slot_mappings of each group, [T] int64: where each token's K and V go:
                  page * page_size + offset in page
    max_seqlen_q  the largest q_len, or an upper bound of it
    decode_rows   number of rows at the front with q_len 1
    state_slots   [B] int32: where in the StatePool each row's state is, -1 for rows of padding;
                  None: the model has no layers with states
    state_snapshots  of rows that are no decode rows, [B] int32 each: a position within the row, and
                  where the state that the sequence has there is stored as well, -1 for nowhere
    """

    cu_seqlens_q: Tensor
    cache_seqlens: Tensor
    page_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]
    max_seqlen_q: int
    decode_rows: int
    q_lens: tuple[int, ...]  # host copies, for back ends that loop over rows on the host
    kv_lens: tuple[int, ...]
    state_slots: Tensor | None = None
    state_snapshots: tuple[Tensor, Tensor] | None = None
    plan: object = None  # what Backend.plan made for attend of the same back end

    @property
    def num_rows(self) -> int:
        return len(self.q_lens)

    def of_last_tokens(self) -> AttentionMetadata:
        """The step reduced to each row's last token, the others counted as cached; not planned."""
        rows = self.num_rows
        cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=self.cu_seqlens_q.device)
        return replace(
            self,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=1,
            decode_rows=rows,
            q_lens=(1,) * rows,
            plan=None,
        )
