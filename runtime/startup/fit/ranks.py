"""How many devices a model needs, and what more of them would bring."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_zoo.config import ModelConfig
from model_zoo.json_fields import ModelError
from model_zoo.layers.error_text import first_line
from model_zoo.parallel.sharded_config import sharded_config
from runtime.config import UNDIVIDED_EXPERTS, ConfigError, EngineConfig, ResolvedConfig
from runtime.memory_plan import MemoryPlan
from runtime.startup.device import UnusableGPU

SUGGESTED = (2, 4, 8)
MAX_RANKS = 16  # that `auto` takes of devices that need not be present
# KV that makes a server useful: with less, --tensor-parallel auto takes more devices.
USEFUL_TOKENS = 32_768
SEQS = 64  # of which these tokens are, unless --max-num-seqs says otherwise

Problem = ConfigError | ModelError
# The configuration with so many ranks, or why there is none.
WithRanks = Callable[[int], ResolvedConfig | Problem]


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Of --tensor-parallel auto."""

    ranks: int
    reason: str
    fits: bool = True  # False: the most that there are, of which none fits


def visible_gpus(requested: EngineConfig) -> int:
    """GPUs that the ranks of one engine may take; 0: it runs on a CPU.

    Raises ConfigError if CUDA does not start.
    """
    if requested.device == "cpu" or not torch.cuda.is_available():
        return 0
    try:
        torch.cuda.init()  # without it whole GPUs are counted, where a part of one (MIG) is visible
    except RuntimeError as error:
        raise ConfigError(f"CUDA cannot be used: {first_line(error)}") from None
    return torch.cuda.device_count()


def choose_ranks(
    requested: EngineConfig,
    whole: ModelConfig,
    most: int,
    with_ranks: WithRanks,
    least: Callable[[], int] = lambda: 1,
) -> RankChoice:
    """The fewest of at most `most` GPUs that hold the weights and a useful KV.

    most: 0 for a CPU.  least: a number that is not too large; a large model takes seconds to try.
    Where no number of them has a useful KV it is the one with the largest.
    Raises ModelError for --expert-parallel of a model without experts, and the ConfigError or
    ModelError that does not depend on the number.
    """
    if most == 0:
        return RankChoice(1, "on a CPU more processes only share its cores")
    useful = _useful_tokens(requested, whole)
    held: dict[int, int] = {}  # tokens, by the number of devices that hold the weights
    problems: dict[int, Problem] = {}  # of others that were tried
    sharded_config(whole, 0, 1, expert_parallel=requested.expert_parallel)
    tried = [ranks for ranks in range(1, most + 1) if _divides(requested, whole, ranks)]
    fewest = least()
    for ranks in tried:
        if ranks < fewest:
            continue
        found = with_ranks(ranks)
        if not isinstance(found, ResolvedConfig):
            problems[ranks] = found
            continue
        held[ranks] = tokens_of(found)
        if held[ranks] >= useful:
            before = tried[tried.index(ranks) - 1]
            fewer = "" if ranks == 1 else f", {_fewer(before, held, problems)}"
            reason = f"{_devices(ranks)} with KV of {held[ranks]:,} tokens{fewer}"
            return RankChoice(ranks, reason)
    if not held:
        if len(problems) > 1 and len({str(problem) for problem in problems.values()}) == 1:
            raise problems[tried[-1]]
        no_room = [ranks for ranks in tried if not _obstacle(ranks, problems)] or tried
        largest = no_room[-1]
        verb = "does" if largest == 1 else "do"
        reason = f"{_devices(largest)} {verb} not hold it"
        return RankChoice(largest, reason + _of_more(tried[-1], problems), fits=False)
    best = max(held, key=held.__getitem__)
    reason = f"{_devices(best)} with KV of {held[best]:,} tokens, the most there is room for"
    return RankChoice(best, reason + _of_more(tried[-1], problems))


def _divides(requested: EngineConfig, whole: ModelConfig, ranks: int) -> bool:
    try:
        sharded_config(whole, 0, ranks, expert_parallel=requested.expert_parallel)
    except ModelError:
        return False
    return True


def _useful_tokens(requested: EngineConfig, whole: ModelConfig) -> int:
    if requested.kv_tokens:  # that is what is wanted
        return 0
    length = requested.max_model_len or whole.max_position
    return min(
        max(USEFUL_TOKENS, requested.max_model_len), length * (requested.max_num_seqs or SEQS)
    )


def _fewer(ranks: int, held: dict[int, int], problems: dict[int, Problem]) -> str:
    """What the next lower number of devices holds."""
    if ranks in held:
        return f"{ranks} would hold {held[ranks]:,}"
    verb = "does" if ranks == 1 else "do"
    return _obstacle(ranks, problems) or f"{ranks} {verb} not hold it"


def _of_more(most: int, problems: dict[int, Problem]) -> str:
    obstacle = _obstacle(most, problems)
    return f", {obstacle}" if obstacle else ""


def _obstacle(ranks: int, problems: dict[int, Problem]) -> str:
    """Why so many devices cannot be used, be their memory as it may; empty: they can."""
    problem = problems.get(ranks)
    if isinstance(problem, ModelError):
        return f"it cannot be divided among {ranks}"
    return str(problem) if isinstance(problem, UnusableGPU) else ""


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"


def ranks_head(requested: EngineConfig, choice: RankChoice | None = None) -> list[str]:
    lines: list[str] = []
    if requested.data_parallel > 1:
        engines = f"{requested.data_parallel} engines, each with the whole model"
        lines.append(f"{engines}: what follows is of one")
    if choice is not None:
        alone = UNDIVIDED_EXPERTS if requested.expert_parallel and choice.ranks == 1 else ""
        lines.append(f"--tensor-parallel auto takes {choice.ranks}: {choice.reason}{alone}")
    if requested.tensor_parallel > 1:
        how = ", whole experts on each" if requested.expert_parallel else ""
        divided = f"divided among {requested.tensor_parallel} devices{how}"
        lines.append(f"{divided}: what follows is of each")
    return lines


def two_ranks(resolved: ResolvedConfig, with_ranks: WithRanks) -> list[str]:
    """What a second device holds besides; resolved: with one."""
    found = with_ranks(2)
    if not isinstance(found, ResolvedConfig) or found.num_pages <= resolved.num_pages:
        return []
    return [
        f"  with --tensor-parallel 2, on two of them: {tokens_of(found):,} tokens, and half of the "
        "weights to read for a token"
    ]


def more_ranks(ranks: int, plan: MemoryPlan, with_ranks: WithRanks) -> str:
    """The least number of devices that hold the model, for an error message.

    ranks, plan: with which it does not fit
    """
    least = max(ranks + 1, math.ceil(ranks * plan.weights / (plan.free * plan.share or 1)))
    for more in SUGGESTED:
        found = with_ranks(more) if more >= least else None
        if isinstance(found, ResolvedConfig):
            return (
                f"; --tensor-parallel {more}, on {more} of them, holds {tokens_of(found):,} tokens"
            )
    return ""


def tokens_of(resolved: ResolvedConfig) -> int:
    return resolved.kv_capacity.tokens(resolved.num_pages, resolved.max_model_len)
