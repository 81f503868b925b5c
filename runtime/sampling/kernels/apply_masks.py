# limit_rows: logits of some rows on their way to be sampled, without what the rows may not take.
#   grid      (tiles, S): a program copies TILE logits
#   reads     logits [R, V] bf16, fp16 or fp32, of the rows sources [S] int32; words [..] int32, of
#             which those from bits_at [S] int32 on are the row's: token t is bit t % 32 of word
#             t // 32; negative: the row may take all
#   writes    out [S, V] fp32: -inf where the bit is 0; NaN stays NaN
#   bound     memory: the logits once, their copy once
# shift_logits: a number is added to some logits, in place: a bias, or -inf.
#   grid      (entries / LANES,)
#   reads     places, tokens [E] int32, values [E] fp32 as int32; no logit is named twice
# ban_tokens: what would complete a banned sequence of one row gets a bias that none outweighs.
#   grid      (B,), a banned sequence each
#   reads     before [B, width] int64, what stands before the last token, ANY matches all;
#             last [B] int64; recent [width] int64, the newest tokens of the row's answer
#   writes    the row's logits [V] fp32, by atomic sums: one token may end several sequences
#   checked   all in tests/runtime/sampling/test_constrained_rows.py against
#   runtime/sampling/eager.py
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, start_successor_and_wait
from runtime.sampling.constraints import ANY, BANNED, WINDOW, Banned

TILE = 2048
WORD = tl.constexpr(32)  # bits
LANES = tl.constexpr(128)
UNALIGNED = ["sources", "bits_at"]  # they begin anywhere in a block


@triton.jit
def limited(logits, words, bits_at, token, vocab):
    """float32 logits of the tokens; -inf for what a row may not take or does not have."""
    inside = token < vocab
    x = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32)
    if bits_at >= 0:
        word = tl.load(words + bits_at + token // WORD, mask=inside, other=0)
        allowed = ((word >> (token % WORD)) & 1) != 0
        x = tl.where(allowed | (x != x), x, -float("inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def limit_rows(
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
    x = limited(logits + source * stride_logits, words, first, token, vocab)
    tl.store(out + place * stride_out + token, x, mask=token < vocab)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["places", "tokens", "values"]
)
def shift_logits(
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
def ban_tokens(
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
    wanted = tl.load(before + sequence * width + lane, mask=mask, other=ANY)
    said = tl.load(recent + lane, mask=mask, other=ANY)
    differs = (wanted != ANY) & (wanted != said)
    if tl.sum(differs.to(tl.int32), 0) == 0:
        tl.atomic_add(logits + tl.load(last + sequence), BANNED)


def limit(logits: Tensor, sources: Tensor, bits_at: Tensor, words: Tensor, out: Tensor) -> None:
    """out [S, V] fp32 gets the rows `sources` [S] of logits [R, V], with what their bits allow."""
    (rows, vocab), options = out.shape, dependent_launch(out.device)
    limit_rows[(triton.cdiv(vocab, TILE), rows)](
        logits, sources, bits_at, words, out, logits.stride(0), out.stride(0), vocab, TILE=TILE,
        **options,
    )  # fmt: skip


def shift(logits: Tensor, places: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values [E], float32 seen as int32, to logits [S, V] fp32 of `tokens` in rows `places`."""
    count, options = len(places), dependent_launch(logits.device)
    shift_logits[(triton.cdiv(count, LANES.value),)](
        logits, places, tokens, values, count, logits.stride(0), **options
    )


def ban(logits: Tensor, banned: Banned, recent: Tensor) -> None:
    """Of one row's logits [V] fp32; recent [WINDOW] int64 ends with its newest token."""
    (count, width), options = banned.before.shape, dependent_launch(logits.device)
    ban_tokens[(count,)](
        logits, banned.before, banned.last, recent[WINDOW - width :], width, ANY=ANY,
        BANNED=BANNED, WIDEST=triton.next_power_of_2(WINDOW), **options,
    )  # fmt: skip
