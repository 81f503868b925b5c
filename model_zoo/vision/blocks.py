"""The layers of the image encoder: blocks, and the mergers that make features of patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.encoder.encoder_attention import encoder_attention
from attention.encoder.seqlens import Seqlens
from model_zoo.layers import fused_kernels
from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.rope import rotate
from model_zoo.vision.vision_config import VisionConfig

EPS = 1e-6


class Dense(nn.Module):
    """x [N, inputs] -> [N, outputs], with a bias; the weight is never quantized."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight, bias = (
            torch.empty(*shape, dtype=dtype) for shape in ((outputs, inputs), (outputs,))
        )
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """GELU, by tanh, of forward(x): on a GPU in the product's epilogue, which saves its own
        read and write."""
        if self.weight.dtype != torch.float32 and fused_kernels.use_fused_kernels(x.device):
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return F.gelu(self(x), approximate="tanh")


class PatchEmbedding(nn.Module):
    """patches [N, values] -> [N, hidden]: a convolution whose stride is its kernel's size."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        kernel = 3, config.frames, config.patch_size, config.patch_size
        weight = torch.empty(config.hidden_size, *kernel, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias = torch.empty(config.hidden_size, dtype=dtype)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class Block(nn.Module):
    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.attention_norm = LayerNorm(hidden, EPS, dtype)
        self.qkv = Dense(hidden, 3 * hidden, dtype)
        self.out = Dense(hidden, hidden, dtype)
        self.mlp_norm = LayerNorm(hidden, EPS, dtype)
        self.up = Dense(hidden, inner, dtype)
        self.down = Dense(inner, hidden, dtype)

    def forward(self, x: Tensor, cos_sin: Tensor, seqlens: Seqlens) -> Tensor:
        """x [N, hidden] of the patches of images; cos_sin [N, head_dim] float32"""
        x = x + self.out(self._attention(self.attention_norm(x), cos_sin, seqlens))
        return x + self.down(self.up.gelu_tanh(self.mlp_norm(x)))

    def _attention(self, x: Tensor, cos_sin: Tensor, seqlens: Seqlens) -> Tensor:
        """All patches of an image attend to all of it; none of q, k and v is copied."""
        qkv = self.qkv(x).view(len(x), 3, self.num_heads, -1)
        rotate_queries_and_keys(qkv, cos_sin)
        return encoder_attention(qkv, seqlens).flatten(1)


def rotate_queries_and_keys(qkv: Tensor, cos_sin: Tensor) -> None:
    """qkv [N, 3, heads, head_dim], in place; cos_sin [N, head_dim] float32"""
    if fused_kernels.use_fused_kernels(qkv.device):
        from model_zoo.vision.rotate_qk import rotate_qk

        rotate_qk(qkv, cos_sin)
        return
    for one in qkv.unbind(1)[:2]:
        one.copy_(rotate(one.float(), cos_sin))


class Merger(nn.Module):
    """Patches [N, hidden], a square's side by side -> [N / square, out].

    joined_norm  the norm is that of a square's values, not of each patch
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype, *, joined_norm: bool) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.merge_size**2
        size = self.joined if joined_norm else config.hidden_size
        self.norm = LayerNorm(size, EPS, dtype)
        self.joined_norm = joined_norm
        self.up = Dense(self.joined, self.joined, dtype)
        self.down = Dense(self.joined, config.out_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.joined)) if self.joined_norm else self.norm(x)
        return self.down(F.gelu(self.up(x.view(-1, self.joined))))
