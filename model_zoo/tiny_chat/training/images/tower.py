"""The image encoder of tiny-chat in plain PyTorch, for batches of pictures of one size.

The computation is that of model_zoo.vision.encoder, which serves one picture at a time; names of
parameters are those of the checkpoint.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.vision.patches import PatchSpec, image_patches

DEPTH, HIDDEN, HEADS, INNER, OUT = 6, 96, 4, 288, 256
PATCH, MERGE, FRAMES, GRID = 16, 2, 2, 8
DEEPSTACK = (1, 3, 5)
EPS, THETA = 1e-6, 10_000.0
SPEC = PatchSpec(PATCH, MERGE, FRAMES)
TOKEN_SIDE = PATCH * MERGE  # pixels


class PatchEmbedding(nn.Module):
    """Learned for one frame: an image stands in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, HIDDEN, (FRAMES, PATCH, PATCH))

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, N, hidden]; cos, sin [N, head_dim / 2]"""
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, HIDDEN // HEADS)).permute(2, 0, 3, 1, 4)
        q, k = _rotated(qkv[0], cos, sin), _rotated(qkv[1], cos, sin)
        out = F.scaled_dot_product_attention(q.to(qkv.dtype), k.to(qkv.dtype), qkv[2])
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(inputs, inner)
        self.linear_fc2 = nn.Linear(inner, outputs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN, EPS)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(HIDDEN, EPS)
        self.mlp = MLP(HIDDEN, INNER, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        inner = F.gelu(self.mlp.linear_fc1(self.norm2(x)), approximate="tanh")
        return x + self.mlp.linear_fc2(inner)


class Merger(MLP):
    def __init__(self, *, joined_norm: bool) -> None:
        joined = HIDDEN * MERGE**2
        super().__init__(joined, joined, OUT)
        self.norm = nn.LayerNorm(joined if joined_norm else HIDDEN, EPS)
        self.joined_norm = joined_norm

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, hidden] -> [B, N / 4, out]"""
        joined = x.shape[0], -1, HIDDEN * MERGE**2
        x = self.norm(x.reshape(joined)) if self.joined_norm else self.norm(x).reshape(joined)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding()
        self.pos_embed = nn.Embedding(GRID**2, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.merger = Merger(joined_norm=False)
        self.deepstack_merger_list = nn.ModuleList([Merger(joined_norm=True) for _ in DEEPSTACK])
        nn.init.normal_(self.pos_embed.weight, std=0.1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B, height, width, 3] -> features [B, tokens, 1 + deepstack, out], and the mean
        of the patches at the end, [B, hidden]."""
        rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
        row, column = coordinates(rows, columns, pixels.device)
        x = self.patch_embed(torch.vmap(partial(image_patches, spec=SPEC))(pixels))
        x = x + self._positions(row, column, rows, columns)
        angles = _angles(row, column)
        cos, sin = angles.cos(), angles.sin()
        features: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index in DEEPSTACK:
                features.append(self.deepstack_merger_list[len(features)](x))
        return torch.stack([self.merger(x), *features], 2), x.mean(1)

    def _positions(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """The learned positions, interpolated linearly so that corners fall on corners."""
        table = self.pos_embed.weight.view(1, GRID, GRID, HIDDEN).permute(0, 3, 1, 2)
        sized = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)
        return sized[0, :, row, column].T


def coordinates(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, square by square, as image_patches has them."""
    number = torch.arange(rows * columns, device=device).view(rows, columns)
    squares = number.view(rows // MERGE, MERGE, columns // MERGE, MERGE).transpose(1, 2).flatten()
    return squares // columns, squares % columns


def _angles(row: Tensor, column: Tensor) -> Tensor:
    """[N, head_dim / 2]: half of them turn by the row, half by the column."""
    half = HIDDEN // HEADS // 2
    frequencies = 1 / THETA ** (torch.arange(0, half, 2, device=row.device).float() / half)
    return torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
