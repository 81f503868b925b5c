"""Gemma 2 and the text models of Gemma 3.

Beside Llama: four norms a layer, of which two are of what is added to the residual; norms multiply
by weight + 1; scaled embeddings; a gelu gate; windows in most layers, in Gemma 3 with a rope of
their own; caps of the logits in Gemma 2.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.attention import Attention
from model_zoo.layers.embedding import embed
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.quantized_rows import QuantizedRows
from model_zoo.layers.rope import Rope
from model_zoo.model import Model, Weights


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, linears: LinearFactory) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        attention, mlp = (f"model.layers.{index}.{part}" for part in ("self_attn", "mlp"))
        kv = {f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}

        def norm() -> RMSNorm:
            return RMSNorm(hidden, config.norm_eps, linears.dtype, plus_one=True)

        self.attention_norm, self.post_attention_norm = norm(), norm()
        self.mlp_norm, self.post_mlp_norm = norm(), norm()
        self.attention = Attention(
            config,
            index,
            qkv=linears.heads(
                hidden, {f"{attention}.q_proj": q_size}, kv, bias=config.qkv_bias, after="norm"
            ),
            out=linears.row(q_size, {f"{attention}.o_proj": hidden}, bias=config.out_bias),
        )
        gate, up = f"{mlp}.gate_proj", f"{mlp}.up_proj"
        self.mlp = SwigluMLP(
            linears.swiglu(hidden, inner, gate, up, bias=False, gelu=True, after="norm"),
            linears.row(inner, {f"{mlp}.down_proj": hidden}, bias=False, after="silu_mul"),
        )

    def forward(
        self,
        x: Tensor | QuantizedRows,
        residual: Tensor,
        inp: ModelInput,
        cos_sin: Tensor,
        logit_rows: Tensor | None = None,
    ) -> tuple[Addend, Tensor]:
        """x, the norm of residual, and residual [T, hidden] -> (MLP output, residual).

        The output is yet to be normed by post_mlp_norm and added.  logit_rows: as for
        Attention.add.
        """
        mixed = self.attention.out.for_norm(self.attention.mix(x, inp, cos_sin, logit_rows))
        if logit_rows is not None:
            residual = residual.index_select(0, logit_rows)
        x, residual = self.mlp_norm.add(
            mixed, residual, self.post_attention_norm, consumer=self.mlp
        )
        return self.mlp.for_norm(x), residual


class Gemma(Model):
    norm: RMSNorm

    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears, Layer, partial(RMSNorm, plus_one=True))
        assert config.rope is not None
        ropes = [config.rope] + ([config.local_rope] if config.local_rope else [])
        self.ropes = nn.ModuleList([Rope(rope, config.head_dim) for rope in ropes])

    def forward(self, inp: ModelInput) -> Tensor:
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        consumers = [*(layer.attention.qkv for layer in self.layers), None]
        x, residual, cos_sin = embed(
            self.embedding,
            norms[0],
            self.ropes,  # type: ignore[arg-type]
            inp.tokens,
            inp.positions,
        )
        for layer, norm, consumer in zip(self.layers, norms[1:], consumers[1:], strict=True):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            local = layer.attention.spec.window > 0
            added, residual = layer(x, residual, inp, cos_sin[-1 if local else 0], logit_rows)
            x, residual = norm.add(added, residual, layer.post_mlp_norm, consumer=consumer)
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
            table[f"{name}.post_attention_layernorm.weight"] = layer.post_attention_norm.weight
            table[f"{name}.pre_feedforward_layernorm.weight"] = layer.mlp_norm.weight
            table[f"{name}.post_feedforward_layernorm.weight"] = layer.post_mlp_norm.weight
            if attention.q_norm is not None and attention.k_norm is not None:
                table[f"{name}.self_attn.q_norm.weight"] = attention.q_norm.weight
                table[f"{name}.self_attn.k_norm.weight"] = attention.k_norm.weight
        return table
