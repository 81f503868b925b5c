"""The blocks of experts of the Llama family, and what their checkpoints call the parts of one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model_zoo.config import ModelConfig
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.moe.block import MoE
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.layers.moe.router.router import Router
from model_zoo.layers.quantized_rows import Producer


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Parts of the names that follow `model.layers.N.`."""

    block: str = "mlp"
    router: str = "gate"
    shared: str = "shared_expert"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # As in ExpertNames.
    transposed: bool = False
    interleaved: bool = False
    stacked: bool = False


NAMES = {
    "mixtral": BlockNames("block_sparse_moe", projections=("w1", "w3", "w2")),
    "gpt_oss": BlockNames(router="router", transposed=True, interleaved=True, stacked=True),
    "glm4_moe": BlockNames(shared="shared_experts"),
    "qwen3_vl_moe": BlockNames(transposed=True),
}


def build_moe(config: ModelConfig, index: int, linears: LinearFactory) -> MoE:
    """The experts of layer `index`, which has some."""
    moe, names, hidden = config.moe, _names(config), config.hidden_size
    assert moe is not None
    block = f"model.layers.{index}.{names.block}"
    gate, up, down = names.projections
    experts = ExpertNames(
        f"{block}.experts",
        gate=gate,
        up=up,
        down=down,
        transposed=names.transposed,
        interleaved=names.interleaved,
        stacked=names.stacked,
    )
    shared: SwigluMLP | None = None
    if moe.shared_size is not None:
        name = f"{block}.{names.shared}"
        shared = swiglu_mlp(name, hidden, moe.shared_size, linears, summed=False)
    own = moe.own_experts
    router = Router(moe.router, hidden, linears, shared_gate=moe.shared_gate, own=own)
    return MoE(router, Experts(moe, hidden, experts, linears), shared, linears.communicator)


def swiglu_mlp(
    name: str,
    hidden: int,
    inner: int,
    linears: LinearFactory,
    *,
    bias: bool = False,
    after: Producer | None = None,
    summed: bool = True,
) -> SwigluMLP:
    """after: the kernel that computes x, as in Linear; summed: as in LinearFactory.row"""
    gate, up, down = (f"{name}.{part}_proj" for part in ("gate", "up", "down"))
    return SwigluMLP(
        linears.swiglu(hidden, inner, gate, up, bias=bias, after=after),
        linears.row(inner, {down: hidden}, bias=bias, after="silu_mul", summed=summed),
    )


def router_weights(config: ModelConfig, index: int, moe: MoE) -> dict[str, Tensor]:
    """The parameters of a block that are in no Linear or expert, by their names in the files."""
    names, router = _names(config), moe.router
    block = f"model.layers.{index}.{names.block}"
    found: dict[str, Tensor | None] = {
        f"{block}.{names.router}.weight": router.weight,
        f"{block}.{names.router}.bias": router.bias,
        f"{block}.{names.router}.e_score_correction_bias": router.correction_bias,
        f"{block}.{names.shared}_gate.weight": router.shared_gate_weight,
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _names(config: ModelConfig) -> BlockNames:
    return NAMES.get(config.model_type, BlockNames())
