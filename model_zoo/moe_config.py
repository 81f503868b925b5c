"""MoEConfig: a model's mixture-of-experts layers, read from config.json.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model_zoo.json_fields import Fields

# softmax       of all logits; the k largest probabilities
# topk_softmax  softmax of the k largest logits
# sigmoid       of each logit; the k largest after a correction bias, which their weights have not
Scoring = Literal["softmax", "topk_softmax", "sigmoid"]
# silu_mul           silu(gate) * up
# gelu_tanh_mul      gelu(gate) * up, with the tanh approximation of gelu
# clamped_swiglu     of gpt-oss: (up + 1) * gate * sigmoid(CLAMP_ALPHA * gate), both clamped
Activation = Literal["silu_mul", "gelu_tanh_mul", "clamped_swiglu"]
CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702
MAX_EXPERTS = 1024  # of a layer: the router's kernel has a row of logits in registers


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Which experts a token gets, and with what weights."""

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False  # the weights of a token are divided by their sum
    scale: float = 1.0  # of all weights: `routed_scaling_factor`
    # The experts are in equal groups, of which the best are kept; a group's score is the sum of
    # its two best experts' scores.
    groups: int = 1
    kept_groups: int = 1
    correction_bias: bool = False  # of sigmoid
    bias: bool = False  # of the logits

    def __post_init__(self) -> None:
        assert 1 <= self.top_k <= self.num_experts <= MAX_EXPERTS
        assert self.num_experts % self.groups == 0 and 1 <= self.kept_groups <= self.groups
        assert self.groups == 1 or self.num_experts // self.groups >= 2
        assert self.top_k <= self.kept_groups * (self.num_experts // self.groups)
        assert self.scoring == "sigmoid" or not (self.correction_bias or self.groups > 1)

    @property
    def computes_in_float32(self) -> bool:
        """Whether the router computes in float32, whatever the model's type: sigmoids of near
        experts differ by less than a rounding of bfloat16."""
        return self.scoring == "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The mixture-of-experts layers of a model."""

    router: RouterConfig
    intermediate_size: int  # of an expert
    activation: Activation = "silu_mul"
    bias: bool = False  # of the experts' products
    shared_size: int | None = None  # inner size of the shared expert; None: there is none
    shared_gate: bool = False  # the shared expert's output is multiplied by a sigmoid
    step: int = 1  # every step-th layer has experts ...
    dense_layers: tuple[int, ...] = ()  # ... but for these
    # With --expert-parallel: the experts that the rank has, (first, end); None: all, if only a part
    # of the inner values of each.
    own: tuple[int, int] | None = None

    @property
    def own_experts(self) -> range:
        return range(*self.own) if self.own else range(self.router.num_experts)

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` has experts; the others have one MLP."""
        return (layer + 1) % self.step == 0 and layer not in self.dense_layers

    def token_values(self, hidden: int) -> int:
        """Values of a token in memory: inner ones and outputs of its experts, and its places in the
        lists of all experts, of four bytes each."""
        outputs = self.router.top_k * (self.intermediate_size + hidden)
        return outputs + 2 * len(self.own_experts)


def read_moe(fields: Fields, model_type: str, num_layers: int) -> MoEConfig | None:
    """The experts of Mixtral, Qwen2-MoE and Qwen3-MoE; None: every layer has one MLP.

    Raises ModelError for fields that do not fit one another.
    """
    if model_type == "mixtral":
        router = RouterConfig(
            num_experts=read_num_experts(fields, "num_local_experts", 8),
            top_k=read_top_k(fields, "num_local_experts", 8, 2),
            renormalize=True,
        )
        return MoEConfig(router=router, intermediate_size=fields.integer("intermediate_size"))
    if model_type not in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next"):
        return None
    # transformers 5 saves qwen3_moe with the name of Mixtral's field.
    name = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    always = model_type == "qwen3_5_moe_text"  # which has no such field
    top_k = {"qwen2_moe": 4, "qwen3_next": 10}.get(model_type, 8)
    router = RouterConfig(
        num_experts=read_num_experts(fields, name),
        top_k=read_top_k(fields, name, None, top_k),
        renormalize=always or fields.flag("norm_topk_prob", model_type == "qwen3_next"),
    )
    shared = model_type != "qwen3_moe"
    return MoEConfig(
        router=router,
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("shared_expert_intermediate_size") if shared else None,
        shared_gate=shared,
        step=fields.integer("decoder_sparse_step", 1),
        dense_layers=_dense_layers(fields, num_layers),
    )


def read_num_experts(fields: Fields, name: str, default: int | None = None) -> int:
    count = fields.integer(name) if default is None else fields.integer(name, default)
    if count > MAX_EXPERTS:
        raise fields.error(name, count, f"at most {MAX_EXPERTS} experts are supported")
    return count


def read_top_k(
    fields: Fields,
    experts: str,
    default_experts: int | None,
    default: int,
    *,
    name: str = "num_experts_per_tok",
) -> int:
    """The field `name`; experts, default_experts: as in read_num_experts"""
    count = read_num_experts(fields, experts, default_experts)
    chosen = fields.integer(name, default)
    if chosen > count:
        raise fields.error(name, chosen, f"at most the {count} of `{experts}` are expected")
    return chosen


def _dense_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    name = "mlp_only_layers"
    value = fields.get(name) or []
    if not isinstance(value, list) or not all(
        type(i) is int and 0 <= i < num_layers for i in value
    ):
        raise fields.error(name, value, f"layers from 0 to {num_layers - 1} are expected")
    return tuple(value)
