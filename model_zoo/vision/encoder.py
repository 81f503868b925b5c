"""VisionEncoder: images to the features that take the place of token embeddings (Qwen3-VL).

A vision transformer over patches, with learned positions that are interpolated to the image's grid
and a rope of rows and columns.  Each square of patches becomes one token of the text model.
Several images may be the rows of one batch; the engine encodes one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.encoder.seqlens import Seqlens
from model_zoo.vision.blocks import Block, Merger, PatchEmbedding
from model_zoo.vision.patch_positions import axial_rope, coordinates, interpolated_positions
from model_zoo.vision.patches import PatchSpec, image_patches
from model_zoo.vision.vision_config import VisionConfig


@dataclass(slots=True)
class Encoding:
    """An image, or several, half-way through the encoder."""

    x: Tensor  # [N, hidden] of the patches, and of padding
    cos_sin: Tensor  # [N, head_dim] float32
    seqlens: Seqlens  # of each image, in patches
    features: list[Tensor] = field(default_factory=list[Tensor])  # those taken so far
    stage: int = 0  # the next one

    @property
    def num_patches(self) -> int:
        return sum(self.seqlens.lens)

    def padded(self, rows: int) -> Encoding:
        """The same before its first stage, with zeros behind the patches, `rows` in all.

        What becomes of them is in no feature.
        """
        assert not self.stage
        behind = 0, 0, 0, rows - len(self.x)
        seqlens = replace(self.seqlens, padded=rows)
        return Encoding(F.pad(self.x, behind), F.pad(self.cos_sin, behind), seqlens)


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
        return self._all_stages(self.begin(pixels))

    @torch.inference_mode()
    def encode_batch(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Images of any sizes as `encode`, together, which uses a GPU better than one by one.

        In half precision the features differ by rounding from those of `encode`, since products of
        another number of rows may be summed in another order.
        """
        encoding = self.begin_batch(images)
        tokens = [patches // self.config.merge_size**2 for patches in encoding.seqlens.lens]
        return list(self._all_stages(encoding).split(tokens))

    @torch.inference_mode()
    def begin(self, pixels: Tensor) -> Encoding:
        """An image as in `encode`, before the first stage."""
        return self.begin_batch([pixels])

    @torch.inference_mode()
    def begin_batch(self, images: Sequence[Tensor]) -> Encoding:
        """Images as in `encode_batch`, before the first stage."""
        patch = self.config.patch_size
        grids = [(image.shape[0] // patch, image.shape[1] // patch) for image in images]
        return self._begin([image_patches(image, self.spec) for image in images], grids)

    @torch.inference_mode()
    def advance(self, encoding: Encoding, stages: int) -> Tensor | None:
        """Run the next `stages`.  After the last of num_stages: the features, as `encode`.

        A stage is a block with what is taken after it, or the merger.  Whether they run at once or
        one by one changes no bit.
        """
        for _ in range(stages):
            index, encoding.stage = encoding.stage, encoding.stage + 1
            if index == len(self.blocks):
                tokens = encoding.num_patches // self.config.merge_size**2
                taken = self.merger(encoding.x), *encoding.features
                return torch.stack([each[:tokens] for each in taken], 1)
            encoding.x = self.blocks[index](encoding.x, encoding.cos_sin, encoding.seqlens)
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
        return self._all_stages(self._begin([patches], [(rows, columns)]))

    def _all_stages(self, encoding: Encoding) -> Tensor:
        features = self.advance(encoding, self.num_stages)
        assert features is not None
        return features

    def _begin(self, patches: list[Tensor], grids: list[tuple[int, int]]) -> Encoding:
        """patches: of each image; grids: their rows and columns of patches"""
        found = [self._embed(*each) for each in zip(patches, grids, strict=True)]
        lens = tuple(rows * columns for rows, columns in grids)
        seqlens = Seqlens.of(lens, patches[0].device)
        if len(found) == 1:
            return Encoding(*found[0], seqlens)
        x, cos_sin = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Encoding(x, cos_sin, seqlens)

    def _embed(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """-> x [N, hidden] and cos_sin [N, head_dim] of an image's patches."""
        row, column = coordinates(*grid, self.config.merge_size, patches.device)
        x = self.patch_embedding(patches)
        positions = interpolated_positions(self.positions, self.config.positions, row, column, grid)
        return x + positions.to(x.dtype), axial_rope(row, column, self.config.head_dim)

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
