"""Writes model directories of a published Qwen3-VL shape, without weights.

python -m benchmarks.images.vision_model qwen3-vl-8b DIRECTORY
wavefill serve DIRECTORY --load-format dummy
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.shapes import write_model

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
FIRST_MARK = 300  # a word of the tokenizer has this id before; it is never encoded to
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "out_hidden_size": 4096,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
}
TEXT_OF = {"qwen3-vl-8b": "qwen3-8b"}  # the shape of its text model


def write_vision_model(name: str, directory: Path, *, layers: int = 0, blocks: int = 0) -> Path:
    """layers, blocks: of the text model and of the encoder, fewer than the shape has"""
    write_model(TEXT_OF[name], directory, layers=layers)
    text = json.loads((directory / "config.json").read_text())
    eos = text.pop("eos_token_id")
    text |= {"model_type": "qwen3_vl_text", "max_position_embeddings": 262_144}
    text["rope_theta"] = 5_000_000
    sections = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    vision = dict(VISION)
    if blocks:
        vision |= {"depth": blocks, "deepstack_visual_indexes": [blocks - 1]}
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**text, "rope_scaling": sections},
        "vision_config": vision,
        "vision_start_token_id": FIRST_MARK,
        "image_token_id": FIRST_MARK + 1,
        "vision_end_token_id": FIRST_MARK + 2,
        "eos_token_id": eos,
        "torch_dtype": text["torch_dtype"],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    _add_marks(directory / "tokenizer.json")
    settings = directory / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    settings.write_text(json.dumps(found | {"chat_template": TEMPLATE}))
    return directory


def _add_marks(path: Path) -> None:
    """Three words of the vocabulary become the tokens that stand around and for an image."""
    saved = json.loads(path.read_text())
    vocabulary = saved["model"]["vocab"]
    words = {id: word for word, id in vocabulary.items()}
    for id, mark in enumerate(MARKS, start=FIRST_MARK):
        del vocabulary[words[id]]
        vocabulary[mark] = id
        saved["added_tokens"].append({**saved["added_tokens"][0], "id": id, "content": mark})
    path.write_text(json.dumps(saved, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(TEXT_OF))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the text model has")
    parser.add_argument("--blocks", type=int, default=0, help="fewer than the encoder has")
    args = parser.parse_args()
    print(write_vision_model(args.shape, args.directory, layers=args.layers, blocks=args.blocks))


if __name__ == "__main__":
    main()
