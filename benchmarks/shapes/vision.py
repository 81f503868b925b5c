"""What the directory of a model that reads images has besides: tokens, template, processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
FIRST_MARK = 300  # a word of the tokenizer has this id before; it is never encoded to
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
}
IDS = {
    "vision_start_token_id": FIRST_MARK,
    "image_token_id": FIRST_MARK + 1,
    "vision_end_token_id": FIRST_MARK + 2,
}


def cut_encoder(vision: dict[str, Any], blocks: int) -> dict[str, Any]:
    """`vision_config` with fewer blocks."""
    return vision | {"depth": blocks, "deepstack_visual_indexes": [blocks - 1]}


def add_vision_files(directory: Path) -> None:
    """Beside the files of a text model; config.json gets IDS."""
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    settings = directory / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    settings.write_text(json.dumps(found | {"chat_template": TEMPLATE}))
    _add_marks(directory / "tokenizer.json")


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
