"""What a model computes whose activations are rounded to 8 bits in front of each Linear (W8A8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.layers.quantized_rows import ScaleKind
from model_zoo.model import Model
from tests.support.models.paged_forward import PagedRow

LARGEST = 448.0  # of e4m3
# Activations of W8A8, by the names of quantized_models.py.
ROUNDED: dict[str, ScaleKind] = {
    "fp8-block": "block",
    "fp8-tensor": "row",
    "fp8-channel": "row",
    "int8-row": "int8",
    "int8-row-zeros": "int8 zeros",
}
BLOCK = 128  # columns of a scale, where weights have a scale for each block


def rounded(x: Tensor, by_block: bool) -> Tensor:
    """x [..., K] after e4m3 with a scale for each row, or for each 128 columns of a row."""
    groups = x.unflatten(-1, (-1, BLOCK)) if by_block else x[..., None, :]
    scales = groups.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    codes = (groups.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scales).flatten(-2).to(x.dtype)


def rounded_to_integers(x: Tensor, zeros: bool) -> Tensor:
    """x [..., K] after int8 with a scale for each row; zeros: and a zero point."""
    wide = x.float()
    least = wide.amin(-1, keepdim=True).clamp(max=0)
    if not zeros:
        scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return ((wide / scales).round() * scales).to(x.dtype)
    scales = (wide.amax(-1, keepdim=True).clamp(min=0) - least).clamp_min(1e-12) / 255
    zero = (-128 - least / scales).round()
    codes = ((wide / scales).round() + zero).clamp(-128, 127)
    return ((codes - zero) * scales).to(x.dtype)


def round_activations(layers: nn.Module, kind: ScaleKind) -> None:
    """From now on each Linear of `layers` multiplies rounded activations."""

    def round_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        if kind in ("int8", "int8 zeros"):
            return (rounded_to_integers(args[0], kind == "int8 zeros"),)
        return (rounded(args[0], kind == "block"),)

    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(round_input)


def check_errors_on_a_gpu(
    reference: Any, model: Model, config: ModelConfig, name: str, rounded_factor: float
) -> None:
    """A model on a GPU in bfloat16 errs at most twice as much as transformers' in bfloat16.

    reference       transformers' model of the same weights, in float32
    rounded_factor  takes the place of 2 where activations are rounded in `reference`, too
    """
    tokens = torch.randint(config.vocab_size, (200,))
    with torch.inference_mode():
        exact = reference(tokens[None]).logits[0]
        approximate = reference.to(torch.bfloat16)(tokens[None]).logits[0].float()
        if name in ROUNDED:
            round_activations(reference.model.layers, ROUNDED[name])
            approximate = reference(tokens[None]).logits[0].float()
    expected = (approximate - exact).abs().mean()
    for cuts in ([], [150, 199], [8, 40, 104]):
        row = PagedRow(model, config, torch.bfloat16, device="cuda")
        found = row.feed_in_steps(tokens.cuda(), cuts).float().cpu()
        error = (found - exact).abs().mean()
        most = (rounded_factor if name in ROUNDED else 2) * expected
        assert error <= most, (cuts, error / expected, error / exact.std())
