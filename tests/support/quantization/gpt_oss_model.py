"""A small gpt-oss checkpoint with experts in MXFP4, as the published files have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.quantization import stored_linears as stored

EXCLUDED = [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
]  # fmt: skip


def write_gpt_oss(directory: Path) -> nn.Module:
    """Sizes are no multiples of 128; transformers' model of what the codes mean, in float32."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        vocab_size=131,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=16,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) / 4)
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            continue
        del tensors[name]
        for suffix, values in _stack(random, parameter.data).items():
            tensors[name + suffix] = values
    directory.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": EXCLUDED}
    written = model.config.to_dict() | {"quantization_config": quantization, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(written))
    return model


def _stack(random: np.random.Generator, place: Tensor) -> dict[str, Tensor]:
    """Fill `place` [E, in, out] with random weights -> their tensors by suffix."""
    linears = [
        stored.mxfp4(random, place.shape[2], place.shape[1], writer="gpt-oss") for _ in place
    ]
    for expert, linear in zip(place, linears, strict=True):
        expert.copy_(linear.weight.T)
    return {
        suffix: torch.stack([linear.tensors[suffix] for linear in linears])
        for suffix in ("_blocks", "_scales")
    }
