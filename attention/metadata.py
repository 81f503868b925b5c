"""AttentionMetadata: what attention must know about one step, as device tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device: itself on a CPU, else a copy that the stream orders.

    From pageable memory the host would wait for everything queued before.  The pinned staging
    memory comes from PyTorch's caching allocator, which does not reuse it before the copy has
    happened.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """B rows feed T tokens; row b feeds q_len[b] tokens that end at KV length cache_seqlens[b].

    cu_seqlens_q  [B + 1] int32  prefix sums of the tokens each row feeds
    cache_seqlens [B]     int32  KV length of each row, this step included
    page_table    [B, max_pages] int32  pages of each row in order; entries past its length are junk
    slot_mapping   [T]     int64  where each token's K and V go: page * page_size + offset in page
    max_seqlen_q  no row feeds more tokens
    decode_rows   the first so many rows feed exactly one token
    """

    cu_seqlens_q: Tensor
    cache_seqlens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    max_seqlen_q: int
    decode_rows: int
    q_lens: tuple[int, ...]  # host copies, for back ends that loop over rows on the host
    kv_lens: tuple[int, ...]
    plan: object = None  # what Backend.plan made for its own attend

    @property
    def num_rows(self) -> int:
        return len(self.q_lens)

    def of_last_tokens(self) -> AttentionMetadata:
        """As if each row fed its last token alone, the rest being in the cache; not planned yet."""
        rows = self.num_rows
        counted = torch.arange(rows + 1, dtype=torch.int32, device=self.cu_seqlens_q.device)
        return replace(
            self,
            cu_seqlens_q=counted,
            max_seqlen_q=1,
            decode_rows=rows,
            q_lens=(1,) * rows,
            plan=None,
        )
