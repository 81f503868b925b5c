"""Fill a model from safetensors files, straight from the mapped file into its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model_zoo.config import ModelConfig, ModelError
from model_zoo.registry import build
from model_zoo.weights import Weights

Progress = Callable[[str, int, int], None]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX = "model.safetensors.index.json"
# Saved by some versions of transformers, computed by us.
IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
SHOWN = 5


def load_model(
    config: ModelConfig,
    directory: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    progress: Progress = lambda phase, done, total: None,
) -> nn.Module:
    """Build the model on `device` and load its weights, converted to `dtype`.

    progress("weights", bytes done, bytes in all) is called after each tensor.
    load_format "dummy" fills it with random numbers instead (for benchmarks).
    Raises ModelError if files or tensors are missing, unexpected, damaged or of a wrong shape.
    """
    model = build(config, dtype, device)
    if load_format == "dummy":
        _fill_randomly(model)
    else:
        _fill_from_files(model, config, Path(directory), progress)
    for module in model.modules():
        prepare = getattr(module, "prepare", None)
        if prepare is not None:
            prepare()
    return model.eval()


def _fill_randomly(model: nn.Module) -> None:
    """Deviation 0.02, norms around 1: never zeros, which hardware multiplies faster."""
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm.weight" in name else 0.0, 0.02)


def _fill_from_files(
    model: nn.Module, config: ModelConfig, directory: Path, progress: Progress
) -> None:
    files = find_files(directory)
    missing: Weights = dict(model.weights())  # type: ignore[operator]
    total = sum(path.stat().st_size for path in files)
    done = 0
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    place = _place(missing, name, config, path)
                    if place is not None:
                        tensor = tensors.get_tensor(name)
                        _copy(place, tensor, f"{path}: {name}")
                        done += tensor.nbytes
                        progress("weights", done, total)
        except SafetensorError as error:
            raise ModelError(f"{path}: damaged or not a safetensors file: {error}") from None
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} tensors of a {config.model_type} model are missing: "
            f"{_some(missing)}: download the model again, or check config.json"
        )


def _place(missing: Weights, name: str, config: ModelConfig, path: Path) -> Tensor | None:
    """Where a tensor goes, None if it is not needed; raises ModelError for a stranger."""
    known = name if name in missing else f"transformer.{name}"
    if known in missing:
        return missing.pop(known)
    if name.endswith(IGNORED) or (config.tie_embeddings and name == "lm_head.weight"):
        return None
    raise ModelError(
        f"{path}: tensor {name} is unexpected in a {config.model_type} model of "
        f"{config.num_layers} layers: check that config.json belongs to these weights"
    )


def _copy(place: Tensor, tensor: Tensor, what: str) -> None:
    if place.shape != tensor.shape:
        raise ModelError(
            f"{what} has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}"
        )
    place.copy_(tensor)


def find_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that the index names."""
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: not a safetensors index: {error!r}") from None
        files = [directory / name for name in names]
        absent = [path.name for path in files if path.parent != directory or not path.exists()]
        if absent:
            raise ModelError(f"{index}: names files that are not there: {_some(absent)}")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickles = [path.name for pattern in PICKLES for path in directory.glob(pattern)]
    if pickles:
        raise ModelError(
            f"{directory}: only pickled weights ({_some(pickles)}), which can run code when they "
            "are read: convert them to safetensors"
        )
    raise ModelError(f"{directory}: no *.safetensors file")


def _some(names: list[str] | Weights) -> str:
    shown = list(names)[:SHOWN]
    return ", ".join(shown) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
