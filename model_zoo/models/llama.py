"""The Llama family: Llama 2 and 3, Mistral, Qwen2 and 3, and models with experts of their shape.

They differ in biases, q/k norm, rope, windows, sinks and experts, as ModelConfig says.
"""

from __future__ import annotations

from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.attention import Attention
from model_zoo.layers.embedding import embed
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.mlp import SwigluMLP, link_mlps
from model_zoo.layers.moe.block import MoE
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormOutput
from model_zoo.layers.rope import Rope
from model_zoo.model import Model, Weights
from model_zoo.models.moe_block import build_moe, router_weights, swiglu_mlp


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, linears: LinearFactory) -> None:
        super().__init__()
        hidden = config.hidden_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        attention = f"model.layers.{index}.self_attn"
        kv = {f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        self.attention_norm = RMSNorm(hidden, config.norm_eps, linears.dtype)
        self.attention = Attention(
            config,
            index,
            qkv=linears.heads(
                hidden, {f"{attention}.q_proj": q_size}, kv, bias=config.qkv_bias, after="norm"
            ),
            out=linears.row(q_size, {f"{attention}.o_proj": hidden}, bias=config.out_bias),
        )
        self.mlp_norm = RMSNorm(hidden, config.norm_eps, linears.dtype)
        self.mlp: SwigluMLP | MoE
        if config.moe is not None and config.moe.has_experts(index):
            self.mlp = build_moe(config, index, linears)
        else:
            mlp, inner = f"model.layers.{index}.mlp", config.intermediate_size
            self.mlp = swiglu_mlp(mlp, hidden, inner, linears, bias=config.mlp_bias, after="norm")
        self.attention.out.precedes(self.mlp_norm, self.mlp)

    def forward(
        self,
        x: NormOutput,
        residual: Tensor,
        inp: ModelInput,
        cos_sin: Tensor,
        logit_rows: Tensor | None = None,
    ) -> tuple[Addend | None, Tensor]:
        """x, the norm of residual, and residual [T, hidden] -> (MLP output or None, residual).

        None: it is added to the residual already.  logit_rows: as for Attention.add.
        """
        mixed, residual = self.attention.add(x, residual, inp, cos_sin, logit_rows)
        x, residual = self.mlp_norm.add(mixed, residual, consumer=self.mlp)
        return self.mlp.add(x, residual)


class Llama(Model):
    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears, Layer, RMSNorm)
        assert config.rope is not None
        self.rope = Rope(config.rope, config.head_dim)

    def link_layers(self) -> None:
        """As Model.link_layers."""
        link_mlps(self.layers, lambda layer: (layer.attention_norm, layer.attention.qkv))

    def forward(self, inp: ModelInput) -> Tensor:
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        consumers = [*(layer.attention.qkv for layer in self.layers), None]
        x, residual, (cos_sin,) = embed(
            self.embedding, norms[0], [self.rope], inp.tokens, inp.positions
        )
        for layer, norm, consumer in zip(self.layers, norms[1:], consumers[1:], strict=True):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            added, residual = layer(x, residual, inp, cos_sin, logit_rows)
            x, residual = norm.add(added, residual, consumer=consumer)
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
            if attention.sinks is not None:
                table[f"{name}.self_attn.sinks"] = attention.sinks
            if isinstance(layer.mlp, MoE):
                table |= router_weights(self.config, index, layer.mlp)
        return table
