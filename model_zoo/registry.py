"""Model type -> the class that computes it.  A new model is one file and one line here."""

from __future__ import annotations

import importlib

import torch

from model_zoo.config import ModelConfig
from model_zoo.model import Model

MODELS = {
    "llama": "model_zoo.models.llama:Llama",
    "mistral": "model_zoo.models.llama:Llama",
    "qwen2": "model_zoo.models.llama:Llama",
    "qwen3": "model_zoo.models.llama:Llama",
    "gpt2": "model_zoo.models.gpt2:GPT2",
}


def build(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """The model with memory for its weights on `device` (none on "meta"), not yet filled."""
    module, _, name = MODELS[config.model_type].partition(":")
    with device:
        return getattr(importlib.import_module(module), name)(config, dtype)
