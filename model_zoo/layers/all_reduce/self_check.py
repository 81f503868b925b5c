"""Whether the fused all-reduce works between the GPUs of this host: its results at start.

Peer access that a driver promises and a host does not keep, or a part that never comes, would
otherwise be wrong tokens, or ranks that wait for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.symmetric_buffers import TURNS, SymmetricBuffers, first_problem

ROWS = (1, 8, 128, 2048)  # and as many as the buffers have, if that is less
CALLS = 2 * TURNS  # of each number of rows, without a pause between them
# What a call at first start waits for: other ranks have launched it, too.
LIMIT = 5_000_000  # microseconds on a GPU, polls where the kernel is interpreted
EPS = 1e-6
AT_ONCE = 1  # a limit with which no call waits

AllReduce = Callable[[Tensor], Tensor]  # of the library
Exchange = Callable[[str], list[str]]  # the texts of all ranks, in their order; waits for all


@dataclass(frozen=True, slots=True)
class Called:
    """One call: its residual before and after it, and the norm."""

    rows: int
    call: int
    total: Tensor
    out: Tensor


def self_check(
    buffers: SymmetricBuffers,
    all_reduce: AllReduce,
    exchange: Exchange,
    *,
    plus_one: bool = False,
    limit: int = LIMIT,
) -> str:
    """What is wrong with the fused all-reduce, the same on all ranks; "": nothing.

    Every rank calls it.  Random rows go through the kernel, whose waits have a limit, and the
    results are compared with the library's sums, with PyTorch's norm, and between the ranks.  All
    ranks do as many sums, whatever one of them finds.
    """
    # Compiled and loaded first: one rank may have the kernel in a cache, and another not.
    problem = first_problem(exchange(_attempt(lambda: _compile(buffers, plus_one))))
    if problem:
        return problem
    called: list[Called] = []
    buffers.clear()  # of what has come after a program gave up: all ranks are through with it
    buffers.limit_waits(limit)
    _synchronize(buffers)
    exchange("")
    problem = _attempt(lambda: _call(buffers, called, plus_one))
    problem = first_problem(exchange(problem))
    if problem:
        return problem
    digests = exchange(_digest(called))
    if len(set(digests)) > 1:
        return "the ranks' results of the same sums differ"
    problems = list(_differences(buffers, called, all_reduce, plus_one))
    return first_problem(exchange(next(filter(None, problems), "")))


def _attempt(work: Callable[[], str]) -> str:
    try:
        return work()
    except Exception as error:  # of the compiler, the driver, the allocator: the library remains
        text = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {text}"


def _compile(buffers: SymmetricBuffers, plus_one: bool) -> str:
    buffers.limit_waits(AT_ONCE)
    residual, weight = _shared(buffers, 1, 0)
    part = _part(buffers, 1, 0)
    all_reduce_add_rms_norm(buffers, 0, part, residual, weight, EPS, plus_one=plus_one)
    _synchronize(buffers)
    return ""


def _call(buffers: SymmetricBuffers, called: list[Called], plus_one: bool) -> str:
    """Fill `called`."""
    for rows in sorted({min(rows, buffers.max_rows) for rows in ROWS}):
        for call in range(CALLS):
            turn, part = call % TURNS, _part(buffers, rows, call)
            total, weight = _shared(buffers, rows, call)
            out = all_reduce_add_rms_norm(
                buffers, turn, part, total, weight, EPS, plus_one=plus_one
            )
            called.append(Called(rows, call, total, out))
    _synchronize(buffers)
    return "the part of another rank has not come" if buffers.gave_up else ""


def _differences(
    buffers: SymmetricBuffers, called: list[Called], all_reduce: AllReduce, plus_one: bool
) -> Iterator[str]:
    """What differs from the library's sums, for every call."""
    for each in called:
        parts = all_reduce(_part(buffers, each.rows, each.call).float())
        residual, weight = _shared(buffers, each.rows, each.call)
        compare = partial(_difference, each, residual, weight, parts, plus_one)
        yield _attempt(compare)


def _difference(
    called: Called, residual: Tensor, weight: Tensor, parts: Tensor, plus_one: bool
) -> str:
    """parts: their sum in float32."""
    digit = torch.finfo(residual.dtype).eps
    expected = residual.float() + parts
    total = called.total.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    normed = normed * (weight.float() + plus_one)
    # Sums of more than two parts have another order there, and are rounded elsewhere.
    for name, found, right in (("sum", total, expected), ("norm", called.out.float(), normed)):
        near = torch.isclose(found, right, rtol=4 * digit, atol=1e-4)
        if not bool(near.all()):
            count, of = int((~near).sum()), near.numel()
            return f"of {called.rows} rows {count} of {of} values of the {name} are wrong"
    return ""


def _shared(buffers: SymmetricBuffers, rows: int, call: int) -> tuple[Tensor, Tensor]:
    """The residual [rows, size] and a weight [size], the same on all ranks."""
    generator = _generator(buffers, 1 + 2 * rows * CALLS + call)
    residual = _randn(buffers, generator, rows, buffers.size)
    return residual, _randn(buffers, generator, buffers.size)


def _part(buffers: SymmetricBuffers, rows: int, call: int) -> Tensor:
    """[rows, size] of this rank."""
    seed = (rows * CALLS + call) * buffers.world + buffers.rank
    return _randn(buffers, _generator(buffers, 2 * seed), rows, buffers.size)


def _generator(buffers: SymmetricBuffers, seed: int) -> torch.Generator:
    return torch.Generator(buffers.memory.device).manual_seed(seed)


def _randn(buffers: SymmetricBuffers, generator: torch.Generator, *shape: int) -> Tensor:
    device = buffers.memory.device
    return torch.randn(shape, dtype=buffers.dtype, device=device, generator=generator)


def _synchronize(buffers: SymmetricBuffers) -> None:
    if buffers.memory.device.type == "cuda":
        torch.cuda.synchronize(buffers.memory.device)


def _digest(called: list[Called]) -> str:
    """Of the bits of all results."""
    found = hashlib.sha256()
    for each in called:
        for tensor in (each.total, each.out):
            found.update(tensor.view(torch.uint8).cpu().numpy())
    return found.hexdigest()
