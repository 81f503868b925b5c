"""sharded_config: the shape of what one rank has of a model.  Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from model_zoo.families.model_config import ModelConfig
from model_zoo.json_fields import ModelError
from model_zoo.parallel.shard import Shard

MAX_RANKS = 16  # that a message suggests


def sharded_config(
    config: ModelConfig, rank: int, size: int, *, expert_parallel: bool = False
) -> ModelConfig:
    """The model as rank `rank` of `size` has it; `whole` is the model itself.

    Heads and inner sizes are those of the rank, and the vocabulary is whole, since every rank gets
    all logits; so is the image encoder.  Raises ModelError for a size by which the model cannot be
    divided.

    expert_parallel: experts are divided as wholes, and not the inner values of each
    """
    if expert_parallel and config.moe is None:
        raise ModelError(
            f"--expert-parallel: this {config.model_type} model has no experts: leave it out"
        )
    if size == 1:
        return config
    problem = _problem(config, size, expert_parallel)
    if problem is not None:
        sizes = range(2, MAX_RANKS + 1)
        fitting = [n for n in sizes if _problem(config, n, expert_parallel) is None]
        numbers = ", ".join(map(str, fitting))
        remedy = f"sizes that divide it: {numbers}" if fitting else "leave the option out"
        if not expert_parallel and config.moe and not _problem(config, size, True):
            remedy = f"add --expert-parallel, by which a rank has whole experts; {remedy}"
        raise ModelError(
            f"--tensor-parallel {size}: {problem} of this {config.model_type} model: {remedy}"
        )
    moe, net = config.moe, config.delta_net
    if moe is not None:
        shared = None if moe.shared_size is None else moe.shared_size // size
        inner, own = moe.intermediate_size // size, None
        if expert_parallel:
            each = moe.router.num_experts // size
            inner, own = moe.intermediate_size, (rank * each, (rank + 1) * each)
        moe = replace(moe, intermediate_size=inner, shared_size=shared, own=own)
    if net is not None:
        net = replace(net, key_heads=net.key_heads // size, value_heads=net.value_heads // size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=max(1, config.intermediate_size // size),
        moe=moe,
        delta_net=net,
        shard=Shard(rank, size, max(1, size // config.num_kv_heads)),
        whole=config,
    )


def _problem(config: ModelConfig, size: int, expert_parallel: bool) -> str | None:
    """What cannot be divided among so many ranks; None: all can."""
    sizes = {"attention heads": config.num_heads}
    if config.moe is None or not all(map(config.moe.has_experts, range(config.num_layers))):
        sizes["inner values of an MLP"] = config.intermediate_size
    if config.moe is not None:
        if expert_parallel:
            sizes["experts"] = config.moe.router.num_experts
        else:
            sizes["inner values of an expert"] = config.moe.intermediate_size
        if config.moe.shared_size is not None:
            sizes["inner values of the shared expert"] = config.moe.shared_size
    if config.delta_net is not None:
        sizes["key heads of a gated delta net"] = config.delta_net.key_heads
    for name, count in sizes.items():
        if count % size:
            return f"{size} does not divide the {count} {name}"
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        return f"{size} neither divides the {kv_heads} KV heads nor is a multiple of them"
    if config.vocab_size < size:
        return f"{size} exceeds the vocabulary of {config.vocab_size}"
    return None
