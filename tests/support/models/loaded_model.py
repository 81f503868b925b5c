"""A model with its weights, loaded from beginning to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from model_zoo.config import ModelConfig
from model_zoo.loader import ModelLoader, ProgressCallback
from model_zoo.model import Model


def load_model(
    config: ModelConfig,
    directory: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback = lambda phase, done, total: None,
    **options: Any,
) -> Model:
    return ModelLoader(config, directory, dtype=dtype, device=device, **options).finish(progress)
