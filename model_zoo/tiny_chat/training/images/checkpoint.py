"""Joins the text model and the image encoder: the files of a Qwen3-VL.

`python -m model_zoo.tiny_chat.training.images.checkpoint ENCODER [--text FILE] [--out DIR]` takes
the encoder and the text model that training wrote, as they are, and writes model.safetensors,
config.json and preprocessor_config.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from . import tower
from .text_model import HEAD_DIM, HEADS, KV_HEADS, LAYERS, SECTIONS, THETA, text_weights

MODEL = Path(__file__).parents[2]
TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
VISION = {
    "deepstack_visual_indexes": list(tower.DEEPSTACK),
    "depth": tower.DEPTH,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": tower.HIDDEN,
    "in_channels": 3,
    "intermediate_size": tower.INNER,
    "model_type": "qwen3_vl",
    "num_heads": tower.HEADS,
    "num_position_embeddings": tower.GRID**2,
    "out_hidden_size": tower.OUT,
    "patch_size": tower.PATCH,
    "spatial_merge_size": tower.MERGE,
    "temporal_patch_size": tower.FRAMES,
}
TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": tower.OUT,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": 2048,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": list(SECTIONS),
        "rope_theta": THETA,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 4096,
}
# A square picture is shown as 128 x 128 pixels whatever its size is: training knows no other scale.
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": tower.MERGE,
    "patch_size": tower.PATCH,
    "size": {"longest_edge": 128 * 160, "shortest_edge": 128 * 96},
    "temporal_patch_size": tower.FRAMES,
}


def config_of(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "model_type": "qwen3_vl",
        "text_config": TEXT,
        "tie_word_embeddings": True,
        "vision_config": VISION,
        **{field: tokenizer.token_to_id(token) for field, token in TOKENS.items()},
    }


def join(text: Path, encoder: Path, out: Path) -> None:
    """text: a checkpoint of the text model alone, or one that was joined before."""
    tensors = {f"model.language_model.{name}": one for name, one in text_weights(text).items()}
    for name, one in load_file(encoder).items():
        tensors[f"model.visual.{name}"] = one.to(torch.bfloat16).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    config = config_of(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    for name, value in (("config", config), ("preprocessor_config", PROCESSOR)):
        written = json.dumps(value, indent=2, sort_keys=True) + "\n"
        (out / f"{name}.json").write_text(written, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--text", type=Path, default=MODEL / "model.safetensors")
    parser.add_argument("--out", type=Path, default=MODEL)
    args = parser.parse_args()
    join(args.text, args.encoder, args.out)


if __name__ == "__main__":
    main()
