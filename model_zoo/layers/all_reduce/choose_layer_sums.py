"""Which sums over ranks the GEMMs of layers compute, or send: measured at start, on all ranks.

The kernel of a norm that follows a row-parallel layer sends its product to the other ranks and adds
theirs (add_rms_norm.py).  GEMMs of few rows can do all of it, with what they do of a norm anyway,
and GEMMs of many rows can send each tile while they compute the next.  All ranks call the same
kernels in the same order, whichever of the ways they take, and decide alike.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model_zoo.layers.all_reduce.choose_rows import Time, fastest_rows
from model_zoo.layers.all_reduce.partial_sum import FusedSums
from model_zoo.layers.all_reduce.self_check import AT_ONCE, LIMIT, AllReduce, Exchange
from model_zoo.layers.all_reduce.symmetric_buffers import first_problem
from model_zoo.layers.error_text import first_line
from model_zoo.layers.gemm.implementations import BUCKETS
from model_zoo.layers.gemm.timing import replayed_us, side_stream
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormOutput
from model_zoo.layers.row_parallel import NEVER, RowParallelLinear

# Rows of which so many and fewer may be added by GEMMs: of more, tiles are too large.
FEW = tuple(rows for rows in BUCKETS if rows <= 32)
MANY = (8192, 4096, 2048, 1024)  # rows of which so many and more may be sent by GEMMs
CALLS, REPLAYS = 4, 5  # of a graph, and of a measurement: an even number of calls
AT_A_TIME = 512  # rows that are compared
DIFFERENCE = 4  # of a sum, in roundings of its type: the library may add in another order
NEVER_US = 1e9
log = logging.getLogger(__name__)

Most = Callable[[int], list[int]]  # the most of a number over all ranks; waits for all


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """How this rank communicates at start."""

    all_reduce: AllReduce
    exchange: Exchange
    most: Most


def choose_layer_sums(model: nn.Module, sums: FusedSums, others: OtherRanks) -> str:
    """Set which sums the GEMMs of row-parallel layers compute, and which they send.

    All ranks call it, when their GEMMs have been chosen, and decide alike.  Waits have a limit,
    which stays set.
    Returns what was wrong on some rank, the same on all; "": nothing.  Then GEMMs do nothing of
    the sums that had not been chosen before.
    """
    kinds: dict[tuple[object, ...], list[RowParallelLinear]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, RowParallelLinear) and layer.next is not None:
            kinds[_kind_of(layer)].append(layer)
    for layers in kinds.values():
        kind = _Kind(layers, sums, others)
        kind.choose()
        if kind.problem:
            return kind.problem
    return ""


def described(model: nn.Module) -> str:
    """What GEMMs do of the sums over ranks, for the start report; "": nothing."""
    layers = [layer for layer in model.modules() if isinstance(layer, RowParallelLinear)]
    up_to = max((layer.adds_up_to for layer in layers), default=0)
    sends_from = min((layer.sends_from for layer in layers), default=NEVER)
    adding = f"GEMMs add up to {up_to} tokens" if up_to else ""
    sending = f"GEMMs send {sends_from:,} and more" if sends_from < NEVER else ""
    return ", ".join(filter(None, (adding, sending)))


def fastest_from(rows: Iterable[int], sent: Time, norm: Time) -> int:
    """The smallest number of rows, of `rows` in descending order, with which, and with all larger
    ones, GEMMs that send are the faster; NEVER: with none."""
    chosen = NEVER
    for count in rows:
        if sent(count) >= norm(count):
            break
        chosen = count
    return chosen


def _kind_of(layer: RowParallelLinear) -> tuple[object, ...]:
    """What the time of its sum depends on; the same on all ranks."""
    assert layer.next is not None
    scheme = None if layer.packed is None else layer.packed.scheme
    consumer = type(layer.next[1]).__name__
    between = layer.between_attention_and_experts
    return layer.outputs, layer.inputs, scheme, consumer, between


@dataclass
class _Kind:
    """Layers of one kind.

    problem  what was wrong, on any rank
    """

    layers: Sequence[RowParallelLinear]
    sums: FusedSums
    others: OtherRanks
    problem: str = ""

    def choose(self) -> None:
        layer, most = self.layers[0], self.sums.max_rows
        # Where no rank's GEMM can take over, both ways would be the same, and their times noise.
        few = [rows for rows in FEW if rows <= most and self._any_rank(layer.can_add(rows))]
        may_send = self._any_rank(layer.can_send)
        many = [rows for rows in MANY if rows <= most and may_send]
        up_to = fastest_rows(few, lambda rows: self._us(rows, rows, NEVER), self._norm_us)
        sent_from = fastest_from(many, lambda rows: self._us(rows, 0, rows), self._norm_us)
        self._set(*((0, NEVER) if self.problem else (up_to, sent_from)))

    def _any_rank(self, can: bool) -> bool:
        return self.others.most(int(can)) == [1]

    def _norm_us(self, rows: int) -> float:
        return self._us(rows, 0, NEVER)

    def _set(self, up_to: int, sent_from: int) -> None:
        for layer in self.layers:
            layer.adds_up_to, layer.sends_from = up_to, sent_from

    def _us(self, rows: int, up_to: int, sent_from: int) -> float:
        """Microseconds of a layer, its norm and the product after that, on the slowest rank."""
        if self.problem:
            return NEVER_US
        self._set(up_to, sent_from)
        x, residual = self._operands(rows)
        found: list[Any] = []
        self.problem = (
            self._all_do(lambda: self._try(x, residual.clone(), AT_ONCE), AT_ONCE)
            or self._all_do(lambda: found.append(self._try(x, residual.clone(), LIMIT)), LIMIT)
            or self._difference(x, residual, found[0])
            or self._all_do(lambda: found.append(self._captured(x, residual)), LIMIT)
            or self._all_do(lambda: found.append(replayed_us([found[1]], CALLS, REPLAYS)), LIMIT)
        )
        if self.problem:
            return NEVER_US
        [us] = found[2]
        [slowest] = self.others.most(int(1000 * us))
        log.debug("%d rows of %s: %.1f us", rows, self.layers[0], slowest / 1000)
        return slowest / 1000

    def _all_do(self, work: Callable[[], object], limit: int) -> str:
        """Let all ranks do it when all are there, with buffers in which nothing has come; what went
        wrong on any of them, also that a wait has come to its limit, unless it is AT_ONCE."""
        problem, buffers = "", self.sums.buffers
        self.others.exchange("")
        buffers.clear()
        buffers.limit_waits(limit)
        self.sums.restart()
        self.others.exchange("")
        try:
            work()
            torch.cuda.synchronize()
            if buffers.gave_up and limit != AT_ONCE:
                problem = "the part of another rank has not come"
        except Exception as error:  # of the compiler, the driver, the allocator
            problem = first_line(error)
        return first_problem(self.others.exchange(problem))

    def _try(self, x: Tensor, residual: Tensor, limit: int) -> Tensor:
        """-> the residual after the layer and its norm.  With AT_ONCE all kernels are compiled and
        loaded, also those of the product, by calls that wait for no other rank (self_check.py)."""
        layer = self.layers[0]
        normed, total = _run(layer, x, residual)
        if limit == AT_ONCE:
            _multiply_next(layer, normed)
        return total

    def _difference(self, x: Tensor, residual: Tensor, found: Tensor) -> str:
        """Between the residual and the library's sum, or the ranks' residuals.  All ranks compute
        the library's sum, whatever is wrong; some rows at a time, since memory is full of weights.
        """
        parts: list[Tensor] = []
        problem = self._all_do(lambda: parts.append(Linear.forward(self.layers[0], x)), LIMIT)
        if problem:
            return problem
        [part] = parts
        digit, wrong = torch.finfo(part.dtype).eps, 0
        for begin in range(0, len(x), AT_A_TIME):
            rows = slice(begin, begin + AT_A_TIME)
            expected = residual[rows].float() + self.others.all_reduce(part[rows].float())
            near = torch.isclose(
                found[rows].float(), expected, rtol=DIFFERENCE * digit, atol=DIFFERENCE * digit
            )
            wrong += int((~near).sum())
        problem = f"of {len(x)} rows {wrong} of {found.numel()} sums are wrong" if wrong else ""
        digests = self.others.exchange(_digest(found))
        if len(set(digests)) > 1:
            problem = problem or f"the ranks' sums of {len(x)} rows differ"
        return first_problem(self.others.exchange(problem))

    def _operands(self, rows: int) -> tuple[Tensor, Tensor]:
        """x of this rank, and a residual that is the same on all."""
        layer, rank = self.layers[0], self.sums.buffers.rank
        new = {"dtype": layer.dtype, "device": layer.device}

        def numbers(size: int, seed: int) -> Tensor:
            generator = torch.Generator(layer.device).manual_seed(seed)
            return torch.randn(rows, size, generator=generator, **new)

        return numbers(layer.inputs, 1 + rank), numbers(layer.outputs, 0)

    def _captured(self, x: Tensor, residual: Tensor) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), side_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in range(CALLS):
                    layer = self.layers[call % len(self.layers)]
                    normed, residual = _run(layer, x, residual)
                    _multiply_next(layer, normed)
            finally:
                graph.capture_end()
        return graph


def _run(layer: RowParallelLinear, x: Tensor, residual: Tensor) -> tuple[NormOutput, Tensor]:
    """-> (the norm after the layer, the residual)"""
    assert layer.next is not None
    norm, consumer = layer.next
    assert isinstance(norm, RMSNorm)
    return norm.add(*layer.add(x, residual), consumer=consumer)


def _multiply_next(layer: RowParallelLinear, normed: NormOutput) -> None:
    assert layer.next is not None
    layer.next[1].multiply_first(normed)


def _digest(x: Tensor) -> str:
    """A number that depends on the bits of x [T, N], and on where they are in a row."""
    odd = torch.arange(1, 2 * x.shape[1], 2, dtype=torch.int32, device=x.device)
    parts = (
        (rows.view(torch.int16).int() * odd).sum(dtype=torch.int64) for rows in x.split(AT_A_TIME)
    )
    return str(sum(int(part) for part in parts))
