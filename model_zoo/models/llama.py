"""The Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE.

They differ in biases, q/k norm, rope scaling and experts, as ModelConfig says.
"""

from __future__ import annotations

from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.attention import Attention
from model_zoo.layers.embedding import embed
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.moe.block import MoE
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.layers.moe.router import Router
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rope
from model_zoo.model import Model, Weights
from model_zoo.moe_config import MoEConfig


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, linears: LinearFactory) -> None:
        super().__init__()
        hidden = config.hidden_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        attention = f"model.layers.{index}.self_attn"
        qkv = {
            f"{attention}.q_proj": q_size,
            f"{attention}.k_proj": kv_size,
            f"{attention}.v_proj": kv_size,
        }
        self.attention_norm = RMSNorm(hidden, config.norm_eps, linears.dtype)
        self.attention = Attention(
            config,
            index,
            qkv=linears.linear(hidden, qkv, bias=config.qkv_bias),
            out=linears.linear(q_size, {f"{attention}.o_proj": hidden}, bias=config.out_bias),
        )
        self.mlp_norm = RMSNorm(hidden, config.norm_eps, linears.dtype)
        self.mlp = feed_forward(config, index, linears)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        inp: ModelInput,
        cos_sin: Tensor,
        logit_rows: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """x, the norm of residual, and residual [T, hidden] -> (MLP output or None, residual).

        None: it is added to the residual already.  logit_rows: as for Attention.add.
        """
        x, residual = self.mlp_norm.add(*self.attention.add(x, residual, inp, cos_sin, logit_rows))
        return self.mlp.add(x, residual)


def feed_forward(config: ModelConfig, index: int, linears: LinearFactory) -> SwigluMLP | MoE:
    """The MLP of a layer, or its experts."""
    if config.moe is not None and config.moe.has_experts(index):
        return _moe(config, config.moe, index, linears)
    mlp, inner = f"model.layers.{index}.mlp", config.intermediate_size
    return _swiglu_mlp(mlp, config.hidden_size, inner, linears, bias=config.mlp_bias)


def feed_forward_weights(config: ModelConfig, index: int, moe: MoE) -> Weights:
    """Of a layer's experts, those outside of Linears and experts: the router's."""
    block, router = moe_name(config, index), moe.router
    table: Weights = {f"{block}.gate.weight": router.weight}
    if router.shared_gate_weight is not None:
        table[f"{block}.shared_expert_gate.weight"] = router.shared_gate_weight
    return table


def _swiglu_mlp(
    name: str, hidden: int, inner: int, linears: LinearFactory, *, bias: bool = False
) -> SwigluMLP:
    return SwigluMLP(
        linears.swiglu(hidden, inner, f"{name}.gate_proj", f"{name}.up_proj", bias=bias),
        linears.linear(inner, {f"{name}.down_proj": hidden}, bias=bias),
    )


def _moe(config: ModelConfig, moe: MoEConfig, index: int, linears: LinearFactory) -> MoE:
    name, hidden = moe_name(config, index), config.hidden_size
    names = ExpertNames(f"{name}.experts")
    if config.model_type == "mixtral":
        names = ExpertNames(f"{name}.experts", gate="w1", up="w3", down="w2")
    shared: SwigluMLP | None = None
    if moe.shared_size is not None:
        shared = _swiglu_mlp(f"{name}.shared_expert", hidden, moe.shared_size, linears)
    router = Router(moe.router, hidden, linears, shared_gate=moe.shared_gate)
    return MoE(router, Experts(moe, hidden, names, linears), shared)


def moe_name(config: ModelConfig, index: int) -> str:
    """The checkpoint's name of the block of experts of a layer."""
    block = "block_sparse_moe" if config.model_type == "mixtral" else "mlp"
    return f"model.layers.{index}.{block}"


class Llama(Model):
    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears, Layer, RMSNorm)
        assert config.rope is not None
        self.rope = Rope(config.rope, config.head_dim)

    def forward(self, inp: ModelInput) -> Tensor:
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        x, residual, (cos_sin,) = embed(
            self.embedding, norms[0], [self.rope], inp.tokens, inp.positions
        )
        for layer, norm in zip(self.layers, norms[1:], strict=True):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            x, residual = norm.add(*layer(x, residual, inp, cos_sin, logit_rows))
        return x

    def other_weights(self) -> Weights:
        table: Weights = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            name, attention = f"model.layers.{index}", layer.attention
            table[f"{name}.input_layernorm.weight"] = layer.attention_norm.weight
            table[f"{name}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
            if attention.q_norm is not None and attention.k_norm is not None:
                table[f"{name}.self_attn.q_norm.weight"] = attention.q_norm.weight
                table[f"{name}.self_attn.k_norm.weight"] = attention.k_norm.weight
            if isinstance(layer.mlp, MoE):
                table |= feed_forward_weights(self.config, index, layer.mlp)
        return table
