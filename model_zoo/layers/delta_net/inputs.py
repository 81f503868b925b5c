"""What a gated delta net computes with: a layer's weights, its pools of states, a step's rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_DECODE_TOKENS = 8  # of a row that the decode kernel handles
MAX_CONV_WIDTH = 4  # tokens that a kernel's convolution reaches over
CHUNK = 64  # tokens that a prompt's kernels handle at once; chunks end where positions divide by it


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The weights of one layer that are no linear layer's.

    conv     [conv_dim, K], the depthwise convolution: conv1d.weight without its middle dimension,
             at any strides; kernels read it fastest where channels are contiguous
    a_log    [Hv] float32, the logarithm of the decay's rate
    dt_bias  [Hv]
    norm     [Dv], of the RMSNorm of each value head, which multiplies by the weight, not by 1 + it
    norm_eps of that norm
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    norm_eps: float


@dataclass(frozen=True, slots=True)
class DeltaNetState:
    """The pools of one layer; a sequence has one slot in both, and its content need not be cleared.

    conv   [slots, K, conv_dim] of the type of qkv: the last inputs of the convolution, that of
           position p of the sequence at p % K.  The next token's convolution reaches K - 1 of them,
           and its input replaces the other: a program may store it while others still read
    state  [slots, Hv, Dv, Dk] float32 or bfloat16: the transpose of S, whose rows warps read whole

    A slot's own elements are contiguous; slots may lie apart.
    """

    conv: Tensor
    state: Tensor

    @property
    def key_heads(self) -> int:
        _, value_heads, value_dim, key_dim = self.state.shape
        return (self.conv.shape[2] - value_heads * value_dim) // (2 * key_dim)


@dataclass(frozen=True, slots=True)
class Snapshots:
    """States of rows as they were within the row, stored in further slots: for a cache of prefixes;
    or after each token of rows of few, so that a row whose drafts are refused can continue from the
    last one that was not.

    first  [B] int32: a position in the sequence of each row
    slots  [B, M] int32: where the state goes when the sequence has first[b] + j tokens, for j < M:
           the slot of no row; negative: nowhere, as for rows without a slot.  Positions that the
           row does not reach count as negative ones, and so does `start`

    A step with rows of more than MAX_DECODE_TOKENS, unless they are computed token by token, takes
    one position a row, M = 1, which divides by CHUNK, and only of these rows.
    """

    first: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The rows of a step that have more tokens than the decode kernel takes, and their chunks.

    rows          [most rows] int32: the rows, in order
    first_chunks  [most rows] int32: the index of each row's first chunk
    chunks        [most chunks, 3] int32: row, first token, one past the last token
    counts        [2] int32: how many rows and chunks there are; entries after them are junk
    """

    rows: Tensor
    first_chunks: Tensor
    chunks: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Chunked:
    """What kernels of prompts write for the next ones, as prompt_inputs.py and chunk_local.py say.

    q, k      [T, Hk, Dk] of the type of qkv
    v         [T, Hv, Dv]
    solve, p  [T, Hv, CHUNK]
    gates     [chunks, Hv, 4, CHUNK] float32
    """

    q: Tensor
    k: Tensor
    v: Tensor
    solve: Tensor
    p: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class DeltaNetRows:
    """B rows with T tokens in all, as in AttentionMetadata: row b has the tokens from
    cu_seqlens[b] to cu_seqlens[b + 1], and with them the sequence has cache_seqlens[b].

    cu_seqlens     [B + 1] int32
    cache_seqlens  [B] int32.  A row whose tokens are all that its sequence has starts from a state
                   of zeros, whatever the slot contains; others continue the slot's state
    slots          [B] int32 or int64, of the pools.  Negative: no state is read or written.  Rows
                   without tokens change nothing, whatever their slot; several rows may share a
                   slot only if no answer depends on it
    max_tokens     no row has more; known on the host
    token_by_token rows of any length are computed as those of one token: how a sequence is cut into
                   rows changes no bit then, but for states in bfloat16, which are rounded after
                   each row
    """

    cu_seqlens: Tensor
    cache_seqlens: Tensor
    slots: Tensor
    max_tokens: int
    snapshots: Snapshots | None = None
    token_by_token: bool = False
    chunks: ChunkPlan | None = None  # of plan_rows; None: each layer on a GPU makes its own

    @property
    def num_rows(self) -> int:
        return len(self.slots)
