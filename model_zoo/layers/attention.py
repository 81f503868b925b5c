"""The attention block of all models here: project, turn, store, attend, project."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import rotate

CosSin = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """q, k and v are one product; `index` is the layer's place in the KV pool."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv = Linear(
            config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias, dtype=dtype
        )
        self.out = Linear(q_size, config.hidden_size, bias=config.out_bias, dtype=dtype)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps, dtype)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps, dtype)

    def forward(self, x: Tensor, inp: ModelInput, cos_sin: CosSin | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]; cos_sin [T, 1, head_dim] each, None for no rotation."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        inp.backend.write(k, v, inp.kv, self.index, inp.meta)
        mixed = inp.backend.attend(q.contiguous(), inp.kv, self.index, inp.meta, scale=self.scale)
        return self.out(mixed.flatten(1))
