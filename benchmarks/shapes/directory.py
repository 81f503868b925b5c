"""Writes model directories with a published shape and without weights, for benchmarks.

    python -m benchmarks.shapes qwen3-8b DIRECTORY
    python -m benchmarks.shapes qwen3-30b-a3b DIRECTORY --format int4
    wavefill serve DIRECTORY --load-format dummy

The tokenizer is synthetic: every id of the vocabulary is one word, so that n random tokens are
detokenized to n chunks of text, as with real weights.
"""

from __future__ import annotations

import argparse
import json
from copy import deepcopy
from pathlib import Path

from benchmarks.shapes.published import BY_SLUG, SHAPES, shape
from benchmarks.shapes.quantization import FORMATS
from benchmarks.shapes.vision import IDS, add_vision_files, cut_encoder

END = 256  # the token that ends an answer
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(
    name: str,
    directory: Path,
    *,
    layers: int = 0,
    blocks: int = 0,
    quantization: str | None = None,
) -> Path:
    """config.json and a tokenizer for a published shape, and what it needs to read images.

    layers        cuts it to fewer
    blocks        cuts its image encoder to fewer
    quantization  of FORMATS
    """
    config = deepcopy(shape(name)) | {"eos_token_id": END}
    text = config.get("text_config", config)
    if layers:
        text |= {"num_hidden_layers": layers}
    if "vision_config" in config:
        config |= IDS
    if blocks:
        config["vision_config"] = cut_encoder(config["vision_config"], blocks)
    if quantization is not None:
        config["quantization_config"] = FORMATS[quantization]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    settings |= {"chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    _write_tokenizer(text["vocab_size"], directory / "tokenizer.json")
    if "vision_config" in config:
        add_vision_files(directory)
    return directory


def _write_tokenizer(vocab_size: int, path: Path) -> None:
    """Byte-level, without merges: 256 bytes, the end, then words that are never encoded to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: id for id, symbol in enumerate(symbols)}
    vocab |= {f"Ġ{word(id)}": id for id in range(len(symbols) + 1, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    # Added by hand: the library would give the next free id, and the config names this one.
    saved = json.loads(path.read_text())
    saved["added_tokens"] = [
        {
            "id": len(symbols),
            "content": "<|end|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ]
    saved["model"]["vocab"]["<|end|>"] = len(symbols)
    path.write_text(json.dumps(saved, ensure_ascii=False))


def word(number: int) -> str:
    """A different word for each number."""
    letters = ""
    while number:
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted({*SHAPES, *BY_SLUG}))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--format", choices=sorted(FORMATS), default=None, help="of weights")
    args = parser.parse_args()
    made = write_model(args.shape, args.directory, layers=args.layers, quantization=args.format)
    print(made)
