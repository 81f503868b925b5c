"""Model type -> model class.  A new architecture is one file and one line here."""

from __future__ import annotations

import importlib

import torch

from model_zoo.config import ModelConfig
from model_zoo.families.qwen3_5 import MODEL_TYPES as QWEN3_5
from model_zoo.layers.linear_factory import LinearFactory, SchemeOf, unquantized
from model_zoo.model import Model
from model_zoo.parallel.communicator import Alone, Communicator

MODELS = {
    "llama": "model_zoo.models.llama:Llama",
    "mistral": "model_zoo.models.llama:Llama",
    "qwen2": "model_zoo.models.llama:Llama",
    "qwen3": "model_zoo.models.llama:Llama",
    "mixtral": "model_zoo.models.llama:Llama",
    "qwen2_moe": "model_zoo.models.llama:Llama",
    "qwen3_moe": "model_zoo.models.llama:Llama",
    **dict.fromkeys(QWEN3_5, "model_zoo.models.qwen3_5:Qwen35"),
    "qwen3_vl": "model_zoo.models.llama:Llama",
    "qwen3_vl_moe": "model_zoo.models.llama:Llama",
    "gemma2": "model_zoo.models.gemma:Gemma",
    "gemma3": "model_zoo.models.gemma:Gemma",
    "gemma3_text": "model_zoo.models.gemma:Gemma",
    "gpt_oss": "model_zoo.models.llama:Llama",
    "glm4_moe": "model_zoo.models.llama:Llama",
    "gpt2": "model_zoo.models.gpt2:GPT2",
}
# With their image encoder (ModelConfig.vision).
VISION_MODELS = {
    **dict.fromkeys(QWEN3_5, "model_zoo.models.qwen3_5:Qwen35VL"),
    "qwen3_vl": "model_zoo.models.qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "model_zoo.models.qwen3_vl:Qwen3VL",
}


def build(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    scheme_of: SchemeOf = unquantized,
    communicator: Communicator | None = None,
) -> Model:
    """The model with uninitialized weights on `device` (no memory on "meta").

    communicator: of the ranks, if config.shard is of several and the model is to run
    """
    models = MODELS if config.vision is None else VISION_MODELS
    module, _, name = models[config.model_type].partition(":")
    with device:
        linears = LinearFactory(dtype, scheme_of, config.shard, communicator or Alone())
        return getattr(importlib.import_module(module), name)(config, linears)
