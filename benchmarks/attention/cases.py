"""What bench_attention measures: one step of one layer, and the bytes and operations it needs."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
MIB = 1 << 20
MAX_DECODE = 8  # largest q_len that the decode kernel serves


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Row b has q_lens[b] query tokens, ending at KV length kv_lens[b]."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int = 128
    page: int = 16
    dtype: str = "bf16"
    kv_dtype: str = ""  # of the pool; "": dtype
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    warm: bool = False  # one KV set over and over, from the L2 cache where it fits
    grid: str = ""  # that the case belongs to
    whole: str = ""  # name of the mixed case of which this is a part

    @property
    def rows(self) -> int:
        return len(self.kv_lens)

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def heads_name(self) -> str:
        return f"{self.heads}/{self.kv_heads}"

    @property
    def is_decode(self) -> bool:
        return max(self.q_lens) <= MAX_DECODE

    @property
    def pages(self) -> int:
        """Pages of the pool that the rows hold."""
        return sum(-(-kv_len // self.page) for kv_len in self.kv_lens)

    @property
    def item_bytes(self) -> int:
        """Of a number in the pool."""
        return ITEM_BYTES[self.kv_dtype or self.dtype]

    @property
    def cell_bytes(self) -> int:
        """Of one token's key in all KV heads; its value has as many."""
        return self.kv_heads * self.head_dim * self.item_bytes

    @property
    def kv_bytes(self) -> int:
        """Keys and values that any query sees: what must be read at least once."""
        seen = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            seen += min(kv_len, self.window + q_len - 1) if self.window else kv_len
        return 2 * seen * self.cell_bytes

    @property
    def qo_bytes(self) -> int:
        """Queries read and results written."""
        return 2 * self.tokens * self.heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Of both matrix products, over the pairs of query and key that see each other."""
        pairs = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            first = kv_len - q_len + 1  # keys that the row's first query sees
            if not self.window:
                pairs += q_len * (first + kv_len) // 2
            else:
                pairs += sum(min(first + i, self.window) for i in range(q_len))
        return 4 * self.heads * self.head_dim * pairs
