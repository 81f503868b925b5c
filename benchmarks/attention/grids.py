"""The grids of bench_attention: which steps each of them measures.

Grids take no arguments, so that a run can be repeated: random lengths have a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.attention.cases import AttentionCase

BATCHES = (6, 9, 17, 20, 24, 34, 40, 45, 48, 50, 67, 80, 100, 132, 140, 200)
LENGTHS = (4096, 16384, 32768)
ALL_HEADS = ((8, 1), (32, 8))
B1_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SKEWED_BATCHES = (8, 24, 40, 64, 128, 256)


def short(length: int) -> str:
    """4096 -> 4k."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def equal(rows: int, length: int, heads: tuple[int, int], **more: Any) -> AttentionCase:
    """Rows of one KV length with q_len tokens each, default 1."""
    q_len = more.pop("q_len", 1)
    name = more.pop("name", f"{rows} x {short(length)}")
    return AttentionCase(name, (q_len,) * rows, (length,) * rows, *heads, **more)


def decode_grid() -> Iterator[AttentionCase]:
    """Batches just past a wave, where equal splits leave most SMs idle."""
    for heads in ALL_HEADS:
        for length in LENGTHS:
            for rows in BATCHES:
                yield equal(rows, length, heads)


def b1_grid() -> Iterator[AttentionCase]:
    """One row: Flash-Decoding's lengths, cold and warm, and its head layouts."""
    for warm in (False, True):
        for length in B1_LENGTHS:
            yield equal(1, length, (16, 2), warm=warm)
    for heads in ((32, 32), (32, 8), (16, 1)):
        yield equal(1, 8192, heads)


def tp8_grid() -> Iterator[AttentionCase]:
    """A 70B model's share of one GPU of eight: the sizes of the article on wave quantization."""
    for rows in (16, 32, 64, 128, 19, 27):
        for length in (4096, 32768):
            yield equal(rows, length, (8, 1))
    for rows in (20, 21, 22, 23):
        yield equal(rows, 36864, (8, 1))


def small_grid() -> Iterator[AttentionCase]:
    """Few rows of an 8B model, and powers of two, where FlashAttention-3's split is at its best."""
    for rows in (1, 8):
        for length in (1024, 4096, 16384, 32768):
            yield equal(rows, length, (32, 8))
    for rows in (2, 4, 16, 32):
        yield equal(rows, 4096, (32, 8))
    for rows in (64, 256):
        yield equal(rows, 1024, (32, 8))


def _clipped(length: float, most: int) -> int:
    return max(16, min(most, int(length)))


DISTRIBUTIONS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "uniform to 8k": lambda rng, rows: [rng.randint(1, 8192) for _ in range(rows)],
    "lognormal 2k": lambda rng, rows: [
        _clipped(rng.lognormvariate(7.62, 1.0), 32768) for _ in range(rows)
    ],
    "chat": lambda rng, rows: [_clipped(rng.lognormvariate(6.2, 1.1), 8192) for _ in range(rows)],
    "1 in 20 long": lambda rng, rows: [
        rng.randint(*((24576, 40960) if row % 20 == 0 else (256, 2048))) for row in range(rows)
    ],
    "one of 128k": lambda rng, rows: [131072] + [1024] * (rows - 1),
}


def skewed_grid() -> Iterator[AttentionCase]:
    """Rows of different lengths."""
    for name, lengths in DISTRIBUTIONS.items():
        for heads in ALL_HEADS:
            for rows in SKEWED_BATCHES:
                rng = random.Random(rows)
                kv_lens = tuple(lengths(rng, rows))
                yield AttentionCase(f"{rows} {name}", (1,) * rows, kv_lens, *heads)


def features_grid() -> Iterator[AttentionCase]:
    """One feature at a time: q_len, pages, head sizes, fp8, windows, sinks."""
    for rows in (1, 8, 32):
        for q_len in (1, 2, 4, 8):
            name = f"{rows} x 8k q_len {q_len}"
            yield equal(rows, 8192, (32, 8), q_len=q_len, name=name)
    for page in (16, 32, 64, 128):
        for rows, heads in ((48, (8, 1)), (17, (32, 8))):
            name = f"{rows} x 4k page {page}"
            yield equal(rows, 4096, heads, page=page, name=name)
    for rows, length, heads in ((1, 32768, (16, 2)), (48, 4096, (8, 1)), (17, 32768, (32, 8))):
        name = f"{rows} x {short(length)} fp8"
        yield equal(rows, length, heads, kv_dtype="fp8", name=name)
    for head_dim in (64, 80, 96, 192, 256):
        name = f"24 x 8k d{head_dim}"
        yield equal(24, 8192, (32, 8), head_dim=head_dim, name=name)
    for window in (128, 4096):
        name = f"64 x 16k window {window}"
        yield equal(64, 16384, (32, 8), window=window, name=name)
    yield equal(24, 8192, (64, 8), head_dim=64, sinks=True, name="24 x 8k d64 sinks")
    yield equal(24, 8192, (32, 8), softcap=50.0, name="24 x 8k softcap")


def fp8_grid() -> Iterator[AttentionCase]:
    """Float8 pages, from what a cache holds to a GiB."""
    for rows, length, heads in (
        (1, 32768, (16, 2)),
        (48, 4096, (8, 1)),
        (140, 16384, (8, 1)),
        (17, 4096, (32, 8)),
        (64, 4096, (32, 8)),
        (17, 32768, (32, 8)),
        (32, 4096, (64, 8)),
    ):
        yield equal(rows, length, heads, kv_dtype="fp8")
    yield equal(64, 8192, (32, 8), head_dim=64, kv_dtype="fp8", name="64 x 8k d64")
    name = "32 x 8k q_len 4"
    yield equal(32, 8192, (32, 8), q_len=4, kv_dtype="fp8", name=name)


def flat_grid() -> Iterator[AttentionCase]:
    """One row of a 34B model's heads over lengths, bf16 and fp8."""
    for kv_dtype in ("", "fp8"):
        for length in B1_LENGTHS[:-1]:
            name = f"1 x {short(length)} {kv_dtype}".rstrip()
            yield equal(1, length, (64, 8), kv_dtype=kv_dtype, name=name)


def prefill(
    name: str,
    q_lens: Sequence[int],
    prefix: int = 0,
    heads: tuple[int, int] = (32, 8),
    **more: Any,
) -> AttentionCase:
    """Rows with q_lens query tokens after `prefix` cached tokens."""
    kv_lens = tuple(q_len + prefix for q_len in q_lens)
    return AttentionCase(name, tuple(q_lens), kv_lens, *heads, **more)


def prefill_grid() -> Iterator[AttentionCase]:
    """Causal prompts of 16k tokens in all; other shapes of heads."""
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        rows = 16384 // length
        yield prefill(f"{rows} x {short(length)}", [length] * rows)
    yield prefill("1 x 1k", [1024])
    for length in (4096, 16384):
        rows = 16384 // length
        name = f"{rows} x {short(length)}"
        yield prefill(name, [length] * rows, heads=(16, 16))
        yield prefill(f"{name} d64", [length] * rows, head_dim=64)
    yield prefill("4 x 4k", [4096] * 4, heads=(48, 48))
    yield prefill("1 x 20k", [20480], heads=(8, 1))


def chunked_grid() -> Iterator[AttentionCase]:
    """Prompt chunks after a cached prefix; prompts of many lengths; page sizes."""
    for q_len in (512, 2048, 8192):
        for prefix in (0, 8192, 32768, 131072):
            name = f"{short(q_len)} after {short(prefix)}"
            yield prefill(name, [q_len], prefix)
    yield prefill("4 x 512 after 8k", [512] * 4, 8192)
    rng = random.Random(7)
    prompts = [_clipped(rng.lognormvariate(5.5, 1.2), 4096) for _ in range(32)]
    yield prefill("32 prompts of chats", [max(16, prompt) for prompt in prompts])
    for page in (16, 64, 128):
        yield prefill(f"4 x 4k page {page}", [4096] * 4, page=page)


def mixed_grid() -> Iterator[AttentionCase]:
    """Prompts and decoding rows in one step, and each alone."""
    for new, prefix, rows, length in (
        (2048, 0, 64, 1024),
        (512, 8192, 32, 4096),
        (2048, 16384, 128, 2048),
        (256, 0, 200, 4096),
    ):
        name = f"{new} after {short(prefix)} + {rows} x {short(length)}"
        decode = AttentionCase(f"{name}: decode", (1,) * rows, (length,) * rows, 32, 8, whole=name)
        prompt = AttentionCase(f"{name}: prompt", (new,), (new + prefix,), 32, 8, whole=name)
        both = (decode.q_lens + prompt.q_lens, decode.kv_lens + prompt.kv_lens)
        yield decode
        yield prompt
        yield AttentionCase(name, *both, 32, 8)


def seeds_grid() -> Iterator[AttentionCase]:
    """Plain attention, FlashAttention-1 and -2 over lengths, in both phases and both types."""
    for length in (128, 512, 1024, 2048, 4096, 8192):
        yield prefill(f"prompt of {short(length)}", [length])
    for rows in (1, 16):
        for length in (512, 2048, 8192, 32768):
            yield equal(rows, length, (32, 8))
    yield prefill("prompt of 1k fp32", [1024], dtype="fp32")
    yield equal(1, 8192, (32, 8), dtype="fp32", name="1 x 8k fp32")


GRIDS: dict[str, Callable[[], Iterator[AttentionCase]]] = {
    "decode": decode_grid,
    "b1": b1_grid,
    "tp8": tp8_grid,
    "small": small_grid,
    "skewed": skewed_grid,
    "features": features_grid,
    "fp8": fp8_grid,
    "flat": flat_grid,
    "prefill": prefill_grid,
    "chunked": chunked_grid,
    "mixed": mixed_grid,
    "seeds": seeds_grid,
}


def cases_of(grids: Sequence[str], most: int | None = None) -> list[AttentionCase]:
    """The cases of the named grids; of each at most so many, spread over it."""
    found: list[AttentionCase] = []
    for grid in grids:
        cases = [replace(case, grid=grid) for case in GRIDS[grid]()]
        if grid == "mixed":  # the parts of a whole stay with it
            cases = cases[: most and 3 * -(-most // 3)]
        elif most and most < len(cases):
            cases = [cases[i * (len(cases) - 1) // max(most - 1, 1)] for i in range(most)]
        found += cases
    return found
