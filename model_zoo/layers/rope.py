"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its scalings for long contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from model_zoo.config import RopeConfig


class Rope(nn.Module):
    """cos and sin of positions, computed in each step, for the `dim` first values of a head.

    A table for the million positions of a long-context model would take a gigabyte.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.dim = int(head_dim * config.partial)
        device = torch.get_default_device()
        # Not on "meta", where a division imports torch._dynamo, which takes 1.5 s.
        with torch.device("cpu"):
            frequencies = inverse_frequencies(config, self.dim)
        self.frequencies = nn.Buffer(frequencies.to(device), persistent=False)
        self.scale = attention_factor(config)
        # [dim / 2] int64: which of a triple turns a frequency; None: positions are no triples.
        axes = None
        if config.sections:
            with torch.device("cpu"):
                axes = interleaved_axes(config.sections, self.dim // 2)
            axes = nn.Buffer(axes.to(device), persistent=False)
        self.axes: Tensor | None = axes

    def rows(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """positions [T] -> cos_sin [T, dim]: cos of all angles, then sin; once per step.

        positions [3, T]: triples, of a rope with sections; [T] are those whose three are equal.
        The angles are float32; the result has the dtype of q and k, as in transformers.
        """
        if positions.dim() == 2:
            assert self.axes is not None
            angles = positions[self.axes].T.float() * self.frequencies
        else:
            angles = positions[:, None].float() * self.frequencies
        return torch.cat([angles.cos() * self.scale, angles.sin() * self.scale], -1).to(dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the halves of the first values of x [T, heads, head_dim], as many as cos_sin is wide.

    The NeoX form of Hugging Face checkpoints.
    """
    cos, sin = cos_sin[:, None].chunk(2, -1)
    half, rotated = cos.shape[-1], 2 * cos.shape[-1]
    low, high = x[..., :half], x[..., half:rotated]
    turned = [low * cos - high * sin, high * cos + low * sin]
    return torch.cat([*turned, x[..., rotated:]] if rotated < x.shape[-1] else turned, -1)


def inverse_frequencies(config: RopeConfig, dim: int) -> Tensor:
    """[dim / 2] float32.  Sources: the scalings' papers and transformers' rope utilities."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / config.theta**exponent
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "yarn":
        return _yarn(config, plain, dim)
    if config.kind == "llama3":
        return _llama3(config, plain)
    return plain  # also dynamic, which scales nothing within the trained length


def interleaved_axes(sections: tuple[int, ...], half: int) -> Tensor:
    """[half] int64: 0, 1, 2, 0, 1, 2, ... for as long as a section has frequencies left, then 0.

    Source: transformers' Qwen3VLTextRotaryEmbedding.
    """
    axes = torch.zeros(half, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def attention_factor(config: RopeConfig) -> float:
    """Yarn's factor of cos and sin, which keeps the entropy of attention; else 1."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _yarn(config: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """Stretch slow dimensions, keep fast ones, blend between (YaRN, arXiv 2309.00071)."""

    def dimension_of(rotations: float) -> float:
        ratio = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = ramp.clamp(0, 1)
    return plain / config.factor * stretched + plain * (1 - stretched)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: stretch long wavelengths, keep short ones, blend between."""
    original = config.original_max_position
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / config.factor + blend * plain
