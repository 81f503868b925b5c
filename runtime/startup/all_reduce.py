"""How the ranks of --tensor-parallel add their products: in kernels of layers, or by a library.

Decided at start, when the weights are loaded and before a CUDA graph is captured, by all ranks
alike.  Whatever is wrong with the kernels here leaves the library, NCCL, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod

import torch
from torch import nn

from model_zoo.config import ModelConfig
from model_zoo.layers import fused_kernels
from model_zoo.layers.all_reduce.partial_sum import FusedSums
from model_zoo.layers.all_reduce.symmetric_buffers import (
    ALIGNMENT,
    SymmetricBuffers,
    SymmetricMemory,
    buffer_shape,
    buffers_in,
    first_problem,
    rows_of_buffers,
)
from model_zoo.layers.error_text import first_line
from model_zoo.layers.norm import RMSNorm
from model_zoo.model import Model
from model_zoo.parallel.communicator import ProcessGroupCommunicator
from runtime.config import ConfigError, EngineConfig
from runtime.ranks.group import Ranks
from runtime.startup.device import DTYPES
from runtime.startup.engine_spec import EngineSpec

FLAG = "--disable-custom-all-reduce"
NEVER_US = 1e9
log = logging.getLogger("wavefill.startup")


def choose_all_reduce(spec: EngineSpec, model: Model, max_tokens: int) -> str:
    """Let kernels of layers compute the sums over ranks where that works and is faster.

    All ranks call it, when their GEMMs have been chosen.  max_tokens: of a step
    Returns what the start report says of it, "" of a model that is on one device.
    Raises ConfigError if the device cannot be used any more after a kernel has failed.
    """
    ranks, communicator, norm = spec.ranks, spec.ranks.communicator, model.norm
    if not isinstance(communicator, ProcessGroupCommunicator) or ranks.rendezvous is None:
        return ""
    communicator.fused = None
    if refused := _refused(spec, norm, communicator):
        return f"NCCL ({refused})"
    assert isinstance(norm, RMSNorm)
    try:
        found = _prepare(spec, max_tokens)
        problem = found if isinstance(found, str) else _check(found, ranks, communicator, norm)
        _assert_usable(spec.device, problem)
        if isinstance(found, str) or problem:
            return _without(ranks, problem)
        said = _use(found, ranks, communicator, norm)
        return said + _choose_layer_sums(model, ranks, communicator)
    finally:
        if communicator.fused is not None:
            communicator.fused.buffers.limit_waits(0)


def sum_bytes(
    requested: EngineConfig, config: ModelConfig, dtype: torch.dtype, max_tokens: int
) -> int:
    """Bytes of a GPU that the kernels' buffers take, where a start would try them."""
    ranks = config.shard.size
    if ranks == 1 or requested.disable_custom_all_reduce or requested.deterministic:
        return 0
    size, limit = config.hidden_size, SymmetricMemory.max_bytes
    rows = rows_of_buffers(max_tokens, size, dtype, ranks, limit)
    return prod(buffer_shape(rows, size, ranks)) * dtype.itemsize


def _refused(spec: EngineSpec, norm: nn.Module, communicator: ProcessGroupCommunicator) -> str:
    """Why the kernels are not even tried; the same on all ranks."""
    row = spec.config.hidden_size * DTYPES[spec.dtype].itemsize
    if spec.requested.disable_custom_all_reduce:
        return FLAG
    if communicator.in_order:
        return "--deterministic"
    if not isinstance(norm, RMSNorm) or row % ALIGNMENT:
        return f"no kernel adds up {spec.config.model_type}"
    if spec.on_gpu and not fused_kernels.use_fused_kernels(spec.device):
        return "kernels need Triton and compute capability 8.0"
    return ""


def _prepare(spec: EngineSpec, max_tokens: int) -> SymmetricBuffers | str:
    """The buffers of this rank, or why some rank has none."""
    ranks, rendezvous = spec.ranks, spec.ranks.rendezvous
    assert rendezvous is not None
    size, dtype = spec.config.hidden_size, DTYPES[spec.dtype]
    rows = rows_of_buffers(max_tokens, size, dtype, ranks.size, rendezvous.max_bytes)
    memory = buffers = None
    try:
        problem = rendezvous.problem()
        if not problem:
            shape = buffer_shape(rows, size, ranks.size)
            memory = rendezvous.allocate(shape, dtype, spec.device)
    except Exception as error:  # of the driver, the allocator, or another version of PyTorch
        problem = first_line(error)
    # Before one of them waits for the others.
    if problem := first_problem(ranks.exchange(problem)):
        return problem
    assert memory is not None
    try:
        buffers = buffers_in(rendezvous.mapped(memory), ranks.rank)
    except Exception as error:
        problem = first_line(error)
    return first_problem(ranks.exchange(problem)) or buffers or ""


def _check(
    buffers: SymmetricBuffers, ranks: Ranks, communicator: ProcessGroupCommunicator, norm: RMSNorm
) -> str:
    from model_zoo.layers.all_reduce.self_check import self_check  # needs Triton

    return self_check(buffers, communicator.all_reduce, ranks.exchange, plus_one=norm.plus_one)


def _use(
    buffers: SymmetricBuffers, ranks: Ranks, communicator: ProcessGroupCommunicator, norm: RMSNorm
) -> str:
    """With as many rows as it is faster for."""
    sums = FusedSums(buffers)
    if buffers.memory.device.type == "cuda":
        problem, sums.max_rows = _measure(buffers, ranks, communicator, norm)
        _assert_usable(buffers.memory.device, problem)
        if problem:
            return _without(ranks, problem)
        if not sums.max_rows:
            return "NCCL (which is the faster here)"
    communicator.fused = sums
    return f"in the norms up to {sums.max_rows:,} tokens, by NCCL above"


def _choose_layer_sums(model: Model, ranks: Ranks, communicator: ProcessGroupCommunicator) -> str:
    """Let GEMMs do what they do faster than the norms, which the start report says."""
    sums = communicator.fused
    if sums is None or sums.buffers.memory.device.type != "cuda":
        return ""
    from model_zoo.layers.all_reduce.choose_layer_sums import (
        OtherRanks,
        choose_layer_sums,
        described,
    )

    others = OtherRanks(communicator.all_reduce, ranks.exchange, ranks.most)
    problem = choose_layer_sums(model, sums, others)
    _assert_usable(sums.buffers.memory.device, problem)
    ranks.exchange("")
    sums.buffers.clear()  # of what came after a program gave up
    ranks.exchange("")
    if problem and ranks.leads:
        log.warning("norms, and not GEMMs, compute some sums over ranks: %s", problem)
    of_gemms = described(model)
    return f"; {of_gemms}" if of_gemms else ""


def _measure(
    buffers: SymmetricBuffers, ranks: Ranks, communicator: ProcessGroupCommunicator, norm: RMSNorm
) -> tuple[str, int]:
    """-> what went wrong on any rank, and for how many rows the kernel is the faster."""
    from model_zoo.layers.all_reduce.choose_rows import fastest_rows, fused_us, library_us, sizes

    problems: list[str] = []

    def slowest(name: str, time: Callable[[int], float]) -> Callable[[int], float]:
        def measured(rows: int) -> float:
            try:
                own = time(rows)
            except Exception as error:  # then the library is the faster
                problems.append(first_line(error))
                own = NEVER_US
            [found] = ranks.most(int(1000 * own))
            log.debug("sums over ranks of %d rows %s: %.1f us", rows, name, found / 1000)
            return found / 1000

        return measured

    options = {"plus_one": norm.plus_one}
    most = fastest_rows(
        sizes(buffers.max_rows),
        slowest("in the norm", lambda rows: fused_us(buffers, rows, **options)),
        slowest(
            "by NCCL", lambda rows: library_us(buffers, communicator.all_reduce, rows, **options)
        ),
    )
    try:
        if buffers.gave_up:
            problems.append("the part of another rank has not come")
    except RuntimeError as error:
        problems.append(first_line(error))
    return first_problem(ranks.exchange(next(iter(problems), ""))), most


def _without(ranks: Ranks, problem: str) -> str:
    if ranks.leads:
        log.warning("sums over ranks are computed by NCCL, which takes longer: %s", problem)
    return f"NCCL ({problem})"


def _assert_usable(device: torch.device, problem: str) -> None:
    if device.type != "cuda" or not problem:
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ConfigError(
            f"the check of the kernels that add up over GPUs has failed ({problem}), and this GPU "
            f"cannot be used any more ({first_line(error)}): start with {FLAG}"
        ) from None
