"""Small checkpoints with quantized linear layers, and transformers' models of what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from model_zoo.quantization.readers.tensor_spec import tensor_name
from tests.support.quantization import stored_linears as stored
from tests.support.quantization.stored_linears import StoredLinear

# Of a model with gated delta nets, as published repositories leave them.
UNQUANTIZED = (".in_proj_a", ".in_proj_b", ".in_proj_ba", ".shared_expert_gate")
Writer = Callable[[Generator, int, int], StoredLinear]
FORMATS: dict[str, Writer] = {
    "fp8-block": stored.fp8,
    "fp8-tensor": partial(stored.fp8, strategy="tensor", scale_name="weight_scale"),
    "fp8-channel": partial(
        stored.fp8,
        strategy="channel",
        scale_name="weight_scale",
        config=stored.compressed_config(
            "float-quantized", num_bits=8, type="float", strategy="channel"
        ),
    ),
    "int4-g128": partial(stored.pack_quantized, group=128),
    "int4-g32-zeros": partial(stored.pack_quantized, symmetric=False),
    "int4-row": partial(stored.pack_quantized, group=None),
    "int8-g128": partial(stored.pack_quantized, bits=8, group=128),
    "int8-row": stored.int_quantized,
    "int8-row-zeros": partial(stored.int_quantized, activation_zeros=True),
    "awq": partial(stored.awq, group=128),
    "gptq": partial(stored.gptq, group=128),
    "gptq-zeros": partial(stored.gptq, group=64, symmetric=False),
    "gptq-8-bit": partial(stored.gptq, bits=8, group=128),
    "gptq-act-order": partial(stored.gptq, group=128, act_order=True),
    "nvfp4": partial(stored.nvfp4, writer="modelopt"),
    "nvfp4-compressed-tensors": partial(stored.nvfp4, writer="compressed-tensors"),
    "mxfp4-compressed-tensors": partial(stored.mxfp4, writer="compressed-tensors"),
}


def shape_config():
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=131,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=0,
    )


def moe_config(inner: int = 128):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=131,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=inner,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=0,
    )


def hybrid_config(*, fused: bool):
    """Qwen3-Next, whose projections are fused, or the text model of Qwen3.5 with experts."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3NextConfig

    shape: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    return Qwen3NextConfig(**shape) if fused else Qwen3_5MoeTextConfig(**shape)


def write_quantized_hybrid(directory: Path, name: str, *, fused: bool) -> nn.Module:
    """The same of a model with gated delta nets; what is small there is not quantized."""
    return _write(directory, name, hybrid_config(fused=fused), UNQUANTIZED)


def write_quantized(directory: Path, name: str) -> nn.Module:
    """Write a checkpoint of a format of FORMATS; transformers' model of it, in float32."""
    return _write(directory, name, shape_config())


def write_quantized_experts(directory: Path, name: str, inner: int = 128) -> nn.Module:
    """The same of a model with experts, each in tensors of its own; the router is unquantized.

    inner: values of an expert
    """
    return _write(directory, name, moe_config(inner))


def write_quantized_vision(directory: Path, name: str, *, experts: bool = False) -> nn.Module:
    """The same of Qwen3-VL, whose image encoder is not quantized."""
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    from tests.support.models.tiny_vision import IMAGE_PAD, VISION

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
    text = (moe_config() if experts else shape_config()).to_dict() | {"rope_parameters": rope}
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    del text["model_type"]
    kind = Qwen3VLMoeConfig if experts else Qwen3VLConfig
    config = kind(text_config=text, vision_config=vision, image_token_id=IMAGE_PAD)
    return _write(directory, name, config)


def _write(
    directory: Path, name: str, config: PretrainedConfig, unquantized: tuple[str, ...] = ()
) -> nn.Module:
    """unquantized: the ends of the names of further layers that are not quantized"""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = kind.from_config(config).float().eval()
    tensors = {name: value for name, value in model.state_dict().items()}
    quantization: dict[str, object] = {}
    for module_name, place in _linears(model):
        if module_name.endswith(unquantized) or ".visual." in module_name:
            continue
        write = FORMATS[name]
        outputs, inputs = place.shape
        if name == "gptq-act-order":
            write = partial(write, order=np.random.default_rng(inputs))
        linear = write(random, outputs, inputs)
        tensors.pop(f"{module_name}.weight", None)
        tensors |= {tensor_name(module_name, s): value for s, value in linear.tensors.items()}
        place.copy_(linear.weight)
        quantization = linear.config
    stacked = (".experts.gate_up_proj", ".experts.down_proj")
    tensors = {name: value for name, value in tensors.items() if not name.endswith(stacked)}
    directory.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    written = model.config.to_dict() | {"quantization_config": quantization, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(written))
    return model


def _linears(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name in the files of each quantized linear layer, and where its weight [N, K] is."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            yield name, module.weight.data
    for name, parameter in model.named_parameters():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(parameter.data):
                gate, up = both.chunk(2)
                yield f"{prefix}.{expert}.gate_proj", gate
                yield f"{prefix}.{expert}.up_proj", up
        elif last == "down_proj":
            for expert, down in enumerate(parameter.data):
                yield f"{prefix}.{expert}.down_proj", down
