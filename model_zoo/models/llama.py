"""The Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3.

They differ in biases, q/k norm and rope scaling, as ModelConfig says.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.attention import Attention
from model_zoo.layers.embedding import embed
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rope
from model_zoo.model import Model
from model_zoo.weights import Weights, fused, unfused


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = Attention(config, index, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = SwigluMLP(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype
        )

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


class Llama(Model):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, Layer, RMSNorm)
        assert config.rope is not None
        self.rope = Rope(config.rope, config.head_dim)

    def forward(self, inp: ModelInput) -> Tensor:
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        x, residual, cos_sin = embed(self.embedding, norms[0], self.rope, inp.tokens, inp.positions)
        for layer, norm in zip(self.layers, norms[1:], strict=True):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            x, residual = norm.add(*layer(x, residual, inp, cos_sin, logit_rows))
        return x

    def weights(self) -> Weights:
        config = self.config
        table: Weights = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        if not config.tie_embeddings:
            table["lm_head.weight"] = self.head.weight
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            name = f"model.layers.{index}"
            attention = layer.attention
            table |= {
                f"{name}.input_layernorm.weight": layer.attention_norm.weight,
                f"{name}.post_attention_layernorm.weight": layer.mlp_norm.weight,
            }
            qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
            table |= fused(attention.qkv, f"{name}.self_attn", qkv)
            table |= unfused(attention.out, f"{name}.self_attn.o_proj")
            gate_up = {"gate_proj": inner, "up_proj": inner}
            table |= fused(layer.mlp.gate_up, f"{name}.mlp", gate_up)
            table |= unfused(layer.mlp.down, f"{name}.mlp.down_proj")
            if attention.q_norm is not None and attention.k_norm is not None:
                table[f"{name}.self_attn.q_norm.weight"] = attention.q_norm.weight
                table[f"{name}.self_attn.k_norm.weight"] = attention.k_norm.weight
        return table
