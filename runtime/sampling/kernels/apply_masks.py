# mask_rows: a float32 copy of some rows of logits, with tokens that are not allowed at -inf.
#   grid      (tiles, S): a program copies TILE logits
#   reads     logits [R, V] bf16, fp16 or fp32, of the rows sources [S] int32; words [..] int32, in
#             which a row's mask begins at bits_at [S] int32: token t is bit t % 32 of word t // 32;
#             negative: all tokens are allowed
#   writes    out [S, V] fp32: -inf where the bit is 0; NaN stays NaN
#   bound     memory: the logits once, their copy once
# add_bias_entries: adds a bias, or -inf, to some logits in place.
#   grid      (entries / LANES,)
#   reads     places, tokens [E] int32, values [E] fp32 as int32; no logit occurs twice
# ban_sequences: adds BANNED, which outweighs any bias, to the tokens of one row's logits that would
#   complete a banned sequence.
#   grid      (B,), a banned sequence each
#   reads     before [B, width] int64, what stands before the last token, ANY matches all;
#             last [B] int64; recent [width] int64, the newest output tokens of the row
#   writes    the row's logits [V] fp32, by atomic adds: one token may complete several sequences
#   checked   all in tests/runtime/sampling/test_constrained_rows.py against
#   runtime/sampling/torch_sampler.py
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from runtime.sampling.banned import ANY, BANNED, WINDOW, BannedTable

TILE = 2048
WORD = tl.constexpr(32)  # bits
LANES = tl.constexpr(128)
UNALIGNED = ["sources", "bits_at"]  # views of a block at any offset


@triton.jit
def load_masked(logits, words, bits_at, token, vocab):
    """float32 logits of the tokens; -inf where not allowed or outside the vocabulary."""
    inside = token < vocab
    x = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32)
    if bits_at >= 0:
        word = tl.load(words + bits_at + token // WORD, mask=inside, other=0)
        allowed = ((word >> (token % WORD)) & 1) != 0
        x = tl.where(allowed | (x != x), x, -float("inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def mask_rows(
    logits,
    sources,
    bits_at,
    words,
    out,
    stride_logits,
    stride_out,
    vocab,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if DEPENDENT:
        start_successor_and_wait()
    source = tl.load(sources + place).to(tl.int64)
    first = tl.load(bits_at + place)
    x = load_masked(logits + source * stride_logits, words, first, token, vocab)
    tl.store(out + place * stride_out + token, x, mask=token < vocab)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["places", "tokens", "values"]
)
def add_bias_entries(
    logits, places, tokens, values, count, stride_logits, DEPENDENT: tl.constexpr
):  # fmt: skip
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = entry < count
    if DEPENDENT:
        start_successor_and_wait()
    place = tl.load(places + entry, mask=mask, other=0).to(tl.int64)
    token = tl.load(tokens + entry, mask=mask, other=0)
    value = tl.load(values + entry, mask=mask, other=0).to(tl.float32, bitcast=True)
    at = logits + place * stride_logits + token
    tl.store(at, tl.load(at, mask=mask, other=0.0) + value, mask=mask)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["recent"])
def ban_sequences(
    logits,
    before,
    last,
    recent,
    width,
    ANY: tl.constexpr,
    BANNED: tl.constexpr,
    WIDEST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDEST)
    mask = lane < width
    if DEPENDENT:
        start_successor_and_wait()
    expected = tl.load(before + sequence * width + lane, mask=mask, other=ANY)
    found = tl.load(recent + lane, mask=mask, other=ANY)
    differs = (expected != ANY) & (expected != found)
    if tl.sum(differs.to(tl.int32), 0) == 0:
        tl.atomic_add(logits + tl.load(last + sequence), BANNED)


def apply_masks(
    logits: Tensor, sources: Tensor, bits_at: Tensor, words: Tensor, out: Tensor
) -> None:
    """Write the rows `sources` [S] of logits [R, V], masked by their bits, to out [S, V] fp32."""
    (rows, vocab), options = out.shape, dependent_launch(out.device)
    mask_rows[(triton.cdiv(vocab, TILE), rows)](
        logits, sources, bits_at, words, out, logits.stride(0), out.stride(0), vocab, TILE=TILE,
        **options,
    )  # fmt: skip


def add_bias(logits: Tensor, places: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values [E], float32 viewed as int32, to logits [S, V] fp32 at (places, tokens) [E]."""
    count, options = len(places), dependent_launch(logits.device)
    add_bias_entries[(triton.cdiv(count, LANES.value),)](
        logits, places, tokens, values, count, logits.stride(0), **options
    )


def ban(logits: Tensor, banned: BannedTable, recent: Tensor) -> None:
    """Add BANNED to one row's logits [V] fp32 where a banned sequence would be completed.

    recent [WINDOW] int64 ends with the row's newest token.
    """
    (count, width), options = banned.before.shape, dependent_launch(logits.device)
    ban_sequences[(count,)](
        logits, banned.before, banned.last, recent[WINDOW - width :], width, ANY=ANY,
        BANNED=BANNED, WIDEST=triton.next_power_of_2(WINDOW), **options,
    )  # fmt: skip
