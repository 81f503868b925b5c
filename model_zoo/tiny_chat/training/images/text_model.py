"""The text model of tiny-chat in plain PyTorch; gradients pass through frozen weights, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.rope import interleaved_axes

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 8
SECTIONS = (12, 10, 10)  # of M-RoPE
THETA, EPS = 10_000.0, 1e-6
PREFIXES = ("model.language_model.", "model.")


def text_weights(path: Path) -> dict[str, Tensor]:
    """Of a checkpoint of the text model alone, or of one with an image encoder, as stored.

    Names begin as in the first: `embed_tokens`, `layers`, `norm`.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.startswith("model.visual."):
            prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
            found[name.removeprefix(prefix)] = tensor
    return found


class TextModel(nn.Module):
    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, *, trained: bool = False
    ) -> None:
        """dtype: of the computation; weights that are trained are kept in float32."""
        super().__init__()
        self.dtype, self.block = dtype, block
        self.names = {name: name.replace(".", "_") for name in weights}
        for name, tensor in weights.items():
            if trained:
                self.register_parameter(self.names[name], nn.Parameter(tensor.float()))
            else:
                self.register_buffer(self.names[name], tensor.to(dtype), persistent=False)
        exponent = torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM
        self.frequencies = nn.Buffer(1 / THETA**exponent, persistent=False)
        self.axes = nn.Buffer(interleaved_axes(SECTIONS, HEAD_DIM // 2), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        index: Tensor | None = None,
        features: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, 256] after the last norm.

        tokens [B, T], padded on the right; index [B, T]: the row of `features` that a token of an
        image has, -1 for text; features [N, 1 + deepstack, 256]; positions [3, B, T].  All but the
        tokens are left out of text alone.
        """
        x = F.embedding(tokens, self.weight("embed_tokens.weight"))
        found = None
        if index is not None and features is not None:
            found = _placed(features.to(x.dtype), index)
            x = torch.where((index >= 0)[..., None], found[:, :, 0], x)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, 1, -1)
        angles = positions.permute(1, 2, 0)[..., self.axes].float() * self.frequencies
        rope = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        for layer in range(LAYERS):
            x = self.block(x, *rope, self._of_layer(layer))
            if found is not None and layer + 1 < found.shape[2]:
                x = x + found[:, :, layer + 1]
        return _norm(x, self.weight("norm.weight"))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight("embed_tokens.weight"))

    def weight(self, name: str) -> Tensor:
        return getattr(self, self.names[name]).to(self.dtype)

    def _of_layer(self, layer: int) -> dict[str, Tensor]:
        prefix = f"layers.{layer}."
        return {
            name.removeprefix(prefix).removesuffix(".weight"): self.weight(name)
            for name in self.names
            if name.startswith(prefix)
        }


def block(x: Tensor, cos: Tensor, sin: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """One layer.  x [B, T, 256]; cos, sin [B or 1, 1, T, head_dim / 2]"""
    normed = _norm(x, weights["input_layernorm"])
    q, k, v = (
        F.linear(normed, weights[f"self_attn.{part}_proj"])
        .unflatten(-1, (-1, HEAD_DIM))
        .transpose(1, 2)
        for part in "qkv"
    )
    q = _rotated(_norm(q, weights["self_attn.q_norm"]), cos, sin)
    k = _rotated(_norm(k, weights["self_attn.k_norm"]), cos, sin)
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(out.transpose(1, 2).flatten(2), weights["self_attn.o_proj"])
    normed = _norm(x, weights["post_attention_layernorm"])
    gate = F.silu(F.linear(normed, weights["mlp.gate_proj"]))
    return x + F.linear(gate * F.linear(normed, weights["mlp.up_proj"]), weights["mlp.down_proj"])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _placed(features: Tensor, index: Tensor) -> Tensor:
    """[B, T, 1 + deepstack, 256]: the features of each token, zeros for text."""
    places = (index.flatten() >= 0).nonzero()[:, 0]
    rows = features[index.flatten()[places]]
    empty = features.new_zeros(index.numel(), *features.shape[1:])
    return empty.index_copy(0, places, rows).unflatten(0, index.shape)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
