"""VisionEncoder: images to the features that take the place of token embeddings (Qwen3-VL).

A vision transformer over patches, with learned positions that are interpolated to the image's grid
and a rope of rows and columns.  Each square of patches becomes one token of the text model.  Images
go through it one by one, so what comes out does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import fused_kernels
from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.rope import rotate
from model_zoo.vision.patches import PatchSpec, image_patches
from model_zoo.vision.vision_config import VisionConfig

EPS = 1e-6
THETA = 10_000.0


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

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """x [N, hidden] of the patches of one image; cos_sin [N, head_dim] float32"""
        x = x + self.out(self._attention(self.attention_norm(x), cos_sin))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def _attention(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """All patches attend to all."""
        qkv = self.qkv(x).view(len(x), 3, self.num_heads, -1)
        rotate_queries_and_keys(qkv, cos_sin)
        q, k, v = (one.transpose(0, 1)[None] for one in qkv.unbind(1))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


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


@dataclass(slots=True)
class Encoding:
    """An image half-way through the encoder."""

    x: Tensor  # [N, hidden] of its patches
    cos_sin: Tensor  # [N, head_dim] float32
    features: list[Tensor] = field(default_factory=list[Tensor])  # those taken so far
    stage: int = 0  # the next one


class VisionEncoder(nn.Module):
    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.spec = PatchSpec(
            config.patch_size, config.merge_size, config.frames, config.mean, config.std
        )
        self.patch_embedding = PatchEmbedding(config, dtype)
        positions = torch.empty(config.positions**2, config.hidden_size, dtype=dtype)
        self.positions = nn.Parameter(positions, requires_grad=False)
        self.blocks = nn.ModuleList([Block(config, dtype) for _ in range(config.depth)])
        self.merger = Merger(config, dtype, joined_norm=False)
        deepstack = [Merger(config, dtype, joined_norm=True) for _ in config.deepstack_layers]
        self.deepstack_mergers = nn.ModuleList(deepstack)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """An RGB image, uint8 [height, width, 3] -> its tokens' features [T, 1 + deepstack, out].

        The sides are multiples of config.token_side.  Features of a token: its embedding, and what
        is added to its hidden state after each of the first text layers.
        """
        height, width, _ = pixels.shape
        patch = self.config.patch_size
        return self(image_patches(pixels, self.spec), height // patch, width // patch)

    @torch.inference_mode()
    def begin(self, pixels: Tensor) -> Encoding:
        """An image as in `encode`, before the first stage."""
        height, width, _ = pixels.shape
        patch = self.config.patch_size
        return self._begin(image_patches(pixels, self.spec), height // patch, width // patch)

    @torch.inference_mode()
    def advance(self, encoding: Encoding, stages: int) -> Tensor | None:
        """Run the next `stages`.  After the last of num_stages: the features, as `encode`.

        A stage is a block with what is taken after it, or the merger.  Whether they run at once or
        one by one changes no bit.
        """
        for _ in range(stages):
            index, encoding.stage = encoding.stage, encoding.stage + 1
            if index == len(self.blocks):
                return torch.stack([self.merger(encoding.x), *encoding.features], 1)
            encoding.x = self.blocks[index](encoding.x, encoding.cos_sin)
            if index in self.config.deepstack_layers:
                merger = self.deepstack_mergers[len(encoding.features)]
                encoding.features.append(merger(encoding.x))
        return None

    @property
    def num_stages(self) -> int:
        return len(self.blocks) + 1

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Of a token's features: 1 + deepstack, out."""
        return 1 + len(self.deepstack_mergers), self.config.out_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self.merger.down.weight.dtype

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """patches [rows * columns, values], in the order of image_patches, of one image."""
        features = self.advance(self._begin(patches, rows, columns), self.num_stages)
        assert features is not None
        return features

    def _begin(self, patches: Tensor, rows: int, columns: int) -> Encoding:
        row, column = _coordinates(rows, columns, self.config.merge_size, patches.device)
        x = self.patch_embedding(patches)
        x = x + self._positions(row, column, rows, columns).to(x.dtype)
        return Encoding(x, _axial_rope(row, column, self.config.head_dim))

    def _positions(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """The learned positions, interpolated linearly so that corners fall on corners."""
        side, total = self.config.positions, None
        taps = [_taps(row, rows, side), _taps(column, columns, side)]
        for row_at, row_weight in taps[0]:
            for column_at, column_weight in taps[1]:
                found = F.embedding(row_at * side + column_at, self.positions)
                part = found * (row_weight * column_weight)[:, None]
                total = part if total is None else total + part
        assert total is not None
        return total

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The parameters by their names in the checkpoint, which begin with `prefix`."""
        table: dict[str, Tensor] = {f"{prefix}pos_embed.weight": self.positions}

        def add(name: str, module: nn.Module) -> None:
            table[f"{prefix}{name}.weight"] = module.get_parameter("weight")
            table[f"{prefix}{name}.bias"] = module.get_parameter("bias")

        add("patch_embed.proj", self.patch_embedding)
        for index, block in enumerate(self.blocks):
            for ours, theirs in BLOCK_NAMES.items():
                add(f"blocks.{index}.{theirs}", block.get_submodule(ours))
        mergers = {"merger": self.merger}
        for index, merger in enumerate(self.deepstack_mergers):
            assert isinstance(merger, Merger)
            mergers[f"deepstack_merger_list.{index}"] = merger
        for name, merger in mergers.items():
            for ours, theirs in MERGER_NAMES.items():
                add(f"{name}.{theirs}", merger.get_submodule(ours))
        return table


BLOCK_NAMES = {
    "attention_norm": "norm1",
    "qkv": "attn.qkv",
    "out": "attn.proj",
    "mlp_norm": "norm2",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}
MERGER_NAMES = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}


def _coordinates(
    rows: int, columns: int, merge: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, int64, square by square."""

    def ordered(grid: Tensor) -> Tensor:
        squares = grid.reshape(rows // merge, merge, columns // merge, merge)
        return squares.transpose(1, 2).flatten()

    row = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    column = torch.arange(columns, device=device)[None].expand(rows, columns)
    return ordered(row), ordered(column)


def _taps(at: Tensor, length: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Where `at` of `length` lies on an axis of `side`: two places, and the weight of each."""
    place = at.float() * ((side - 1) / max(length - 1, 1))
    low = place.floor().long().clamp(max=side - 1)
    share = place - low
    return [(low, 1 - share), ((low + 1).clamp(max=side - 1), share)]


def _axial_rope(row: Tensor, column: Tensor, head_dim: int) -> Tensor:
    """cos and sin [N, head_dim] float32: half of the angles are of the row, half of the column."""
    half = head_dim // 2
    exponent = torch.arange(0, half, 2, device=row.device).float() / half
    frequencies = 1.0 / THETA**exponent
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], -1)
    return torch.cat([angles.cos(), angles.sin()], -1)
