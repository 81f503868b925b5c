"""Qwen3.5 and Qwen3.6, dense and with experts, and Qwen3-Next.

Beside Qwen3: most layers have a gated delta net, whose state of a sequence does not grow, in the
place of attention; the others' attention has an output gate and rotates the front of a head alone;
norms of the residual stream, queries and keys multiply by weight + 1.  Qwen3.5 has the encoder of
images of Qwen3-VL, whose features replace embeddings alone.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.families.model_config import VISION_WEIGHTS
from model_zoo.inputs import ModelInput
from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.attention import Attention
from model_zoo.layers.delta_net.block import DeltaNet, delta_net_rows
from model_zoo.layers.delta_net.inputs import DeltaNetRows
from model_zoo.layers.embedding import embed
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.mlp import SwigluMLP, link_mlps
from model_zoo.layers.moe.block import MoE
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormOutput
from model_zoo.layers.quantized_rows import Consumer, QuantizedRows
from model_zoo.layers.rope import Rope
from model_zoo.model import Model, Weights
from model_zoo.models.moe_block import build_moe, router_weights, swiglu_mlp
from model_zoo.vision.embed import ReadsImages, embed_with_images
from model_zoo.vision.encoder import VisionEncoder


class Layer(nn.Module):
    """attention, delta_net: one of the two"""

    def __init__(self, config: ModelConfig, index: int, linears: LinearFactory) -> None:
        super().__init__()
        name = f"model.layers.{index}"

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, linears.dtype, plus_one=True)

        self.mixer_norm, self.mlp_norm = norm(), norm()
        self.attention: Attention | None = None
        self.delta_net: DeltaNet | None = None
        if config.delta_net is not None and index in config.delta_net.layers:
            self.delta_net = DeltaNet(
                config.delta_net,
                index=config.delta_net.layers.index(index),
                name=f"{name}.linear_attn",
                hidden=config.hidden_size,
                eps=config.norm_eps,
                linears=linears,
            )
        else:
            self.attention = _attention(config, index, linears)
        self.mlp: SwigluMLP | MoE
        if config.moe is not None and config.moe.has_experts(index):
            self.mlp = build_moe(config, index, linears)
        else:
            hidden, inner = config.hidden_size, config.intermediate_size
            self.mlp = swiglu_mlp(f"{name}.mlp", hidden, inner, linears, after="norm")
        mixer = self.attention or self.delta_net
        assert mixer is not None
        mixer.out.precedes(self.mlp_norm, self.mlp)

    @property
    def consumer(self) -> Consumer:
        """Of this layer's first norm."""
        if self.delta_net is not None:
            return self.delta_net
        assert self.attention is not None
        return self.attention.qkv

    def forward(
        self,
        x: NormOutput,
        residual: Tensor,
        inp: ModelInput,
        cos_sin: Tensor,
        rows: DeltaNetRows | None,
        logit_rows: Tensor | None = None,
    ) -> tuple[Addend | None, Tensor]:
        """x, the norm of residual, and residual [T, hidden] -> (MLP output or None, residual).

        None: it is added to the residual already.  logit_rows: as for Attention.add.
        """
        if self.delta_net is not None:
            assert rows is not None and not isinstance(x, QuantizedRows)
            mixed = self.delta_net.add(x, residual, inp, rows, logit_rows)
        else:
            assert self.attention is not None
            mixed = self.attention.add(x, residual, inp, cos_sin, logit_rows)
        x, residual = self.mlp_norm.add(*mixed, consumer=self.mlp)
        return self.mlp.add(x, residual)


def _attention(config: ModelConfig, index: int, linears: LinearFactory) -> Attention:
    name, hidden = f"model.layers.{index}.self_attn", config.hidden_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    queries = {f"{name}.q_proj": 2 * q_size}  # of each head the query, then the gate
    kv = {f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
    return Attention(
        config,
        config.attention_layers.index(index),
        qkv=linears.heads(hidden, queries, kv, bias=config.qkv_bias, after="norm"),
        out=linears.row(q_size, {f"{name}.o_proj": hidden}, bias=config.out_bias),
    )


class Qwen35(Model):
    norm: RMSNorm

    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears, Layer, partial(RMSNorm, plus_one=True))
        assert config.rope is not None
        self.rope = Rope(config.rope, config.head_dim)

    def link_layers(self) -> None:
        """As Model.link_layers."""
        link_mlps(self.layers, lambda layer: (layer.mixer_norm, layer.consumer))

    def forward(self, inp: ModelInput) -> Tensor:
        norms = [*(layer.mixer_norm for layer in self.layers), self.norm]
        consumers = [*(layer.consumer for layer in self.layers), None]
        x, residual, cos_sin = self._embed(inp, norms[0])
        nets = [layer.delta_net for layer in self.layers if layer.delta_net is not None]
        rows: DeltaNetRows | None = None
        if nets:
            rows = delta_net_rows(inp, token_by_token=nets[0].token_by_token)
        for layer, norm, consumer in zip(self.layers, norms[1:], consumers[1:], strict=True):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            added, residual = layer(x, residual, inp, cos_sin, rows, logit_rows)
            x, residual = norm.add(added, residual, consumer=consumer)
        return x

    def _embed(self, inp: ModelInput, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        """The norm of the embeddings, the embeddings [T, hidden], and the rope's rows."""
        x, residual, (cos_sin,) = embed(
            self.embedding, norm, [self.rope], inp.tokens, inp.positions
        )
        return x, residual, cos_sin

    def other_weights(self) -> Weights:
        table: Weights = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            name, attention = f"model.layers.{index}", layer.attention
            table[f"{name}.input_layernorm.weight"] = layer.mixer_norm.weight
            table[f"{name}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
            if attention is not None and attention.q_norm and attention.k_norm:
                table[f"{name}.self_attn.q_norm.weight"] = attention.q_norm.weight
                table[f"{name}.self_attn.k_norm.weight"] = attention.k_norm.weight
            if layer.delta_net is not None:
                table |= layer.delta_net.other_weights()
            if isinstance(layer.mlp, MoE):
                table |= router_weights(self.config, index, layer.mlp)
        return table


class Qwen35VL(ReadsImages, Qwen35):
    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears)
        assert config.vision is not None
        self.vision = VisionEncoder(config.vision, linears.dtype)

    def _embed(self, inp: ModelInput, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        if inp.images is None:
            return super()._embed(inp, norm)
        residual, cos_sin = embed_with_images(
            self.embedding, norm, self.rope, inp.tokens, inp.images
        )
        x, residual = norm.add(None, residual)
        return x, residual, cos_sin

    def other_weights(self) -> Weights:
        return super().other_weights() | self.vision.weights(VISION_WEIGHTS)
