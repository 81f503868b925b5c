"""VisionConfig: the shape of a model's image encoder, read from config.json.  Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from model_zoo.json_fields import Fields

# OpenAI's CLIP, which image processors of Qwen's have where their file says nothing.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Of the vision models of Qwen3-VL and Qwen3.5.

    positions         side of the square of learned positions
    deepstack_layers  after these blocks, features are taken for the first layers of the text model
    mean, std         of pixels in 0 .. 1, by which the encoder's input is normalized
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    patch_size: int
    merge_size: int
    frames: int  # of a patch
    positions: int
    deepstack_layers: tuple[int, ...]
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: three channels of each frame."""
        return 3 * self.frames * self.patch_size**2

    @property
    def token_side(self) -> int:
        """Pixels of a side of the square that one token stands for."""
        return self.patch_size * self.merge_size

    @property
    def feature_size(self) -> int:
        """Values of a token's features: its embedding, and what the first text layers get."""
        return (1 + len(self.deepstack_layers)) * self.out_size

    @property
    def stage_operations(self) -> tuple[tuple[float, float], ...]:
        """Of each stage (VisionEncoder.advance), in 10^9: for a token of an image, and for a pair
        of its tokens."""
        hidden, square = self.hidden_size, self.merge_size**2
        joined = hidden * square
        block = 2 * square * (4 * hidden * hidden + 2 * hidden * self.intermediate_size)
        merger = 2 * (joined * joined + joined * self.out_size)
        tokens = [block + merger * (at in self.deepstack_layers) for at in range(self.depth)]
        tokens[0] += 2 * square * self.patch_values * hidden
        pairs = 4 * square * square * hidden
        return (*((each / 1e9, pairs / 1e9) for each in tokens), (merger / 1e9, 0.0))


def read_vision(
    outer: Fields, hidden_size: int, *, deepstack: tuple[int, ...] = ()
) -> VisionConfig:
    """The `vision_config` of a config.json, and the normalization of the files beside it.

    hidden_size: of the text model; deepstack: VisionConfig.deepstack_layers where no field says
    Raises ModelError, naming the field.
    """
    fields = outer.nested("vision_config")
    depth = fields.integer("depth")
    size, heads = fields.integer("hidden_size"), fields.integer("num_heads")
    if size % heads or size // heads % 4:
        expected = f"a divisor of hidden_size {size} into multiples of 4 is expected"
        raise fields.error("num_heads", heads, expected)
    fields.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if fields.integer("in_channels", 3) != 3:
        raise fields.error("in_channels", fields.get("in_channels"), "only 3 is supported")
    positions = fields.integer("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise fields.error("num_position_embeddings", positions, "a square number is expected")
    out_size = fields.integer("out_hidden_size")
    if out_size != hidden_size:
        expected = f"the text model's hidden_size {hidden_size} is expected"
        raise fields.error("out_hidden_size", out_size, expected)
    mean, std = _normalization(outer)
    return VisionConfig(
        depth=depth,
        hidden_size=size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        out_size=out_size,
        patch_size=fields.integer("patch_size", 16),
        merge_size=fields.integer("spatial_merge_size", 2),
        frames=fields.integer("temporal_patch_size", 2),
        positions=math.isqrt(positions),
        deepstack_layers=_deepstack_layers(fields, depth, deepstack),
        mean=mean,
        std=std,
    )


def _deepstack_layers(fields: Fields, depth: int, default: tuple[int, ...]) -> tuple[int, ...]:
    name = "deepstack_visual_indexes"
    value = fields.get(name)
    layers = list(default) if value is None else value
    if (
        not isinstance(layers, list)
        or not all(type(layer) is int and 0 <= layer < depth for layer in layers)
        or sorted(set(layers)) != layers
    ):
        raise fields.error(name, value, f"ascending blocks from 0 to {depth - 1} are expected")
    return tuple(layers)


def _normalization(outer: Fields) -> tuple[Triple, Triple]:
    """Mean and deviation of the image processor; 0.5 without a file of one."""
    for name in PROCESSOR_FILES:
        path = outer.path.with_name(name)
        if path.is_file():
            found = Fields.read(path)
            if found.get("image_processor"):
                found = found.nested("image_processor")
            if found.get("image_processor_type"):
                mean = _triple(found, "image_mean", CLIP_MEAN)
                return mean, _triple(found, "image_std", CLIP_STD)
    return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


def _triple(fields: Fields, name: str, default: Triple) -> Triple:
    value = fields.get(name)
    if value is None:
        return default
    numbers = isinstance(value, list) and all(
        isinstance(one, int | float) and 0 <= one < 1e6 for one in value
    )
    if not numbers or len(value) != 3 or (name == "image_std" and 0 in value):
        raise fields.error(name, value, "three numbers are expected, of image_std none of them 0")
    first, second, third = value
    return float(first), float(second), float(third)
