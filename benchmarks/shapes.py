"""Writes model directories with a published shape and without weights, for benchmarks.

    python -m benchmarks.shapes qwen3-8b DIRECTORY
    wavefill serve DIRECTORY --load-format dummy

The tokenizer is synthetic: every id of the vocabulary is one word, so that n random tokens are
detokenized to n chunks of text, as with real weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "eos_token_id": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": QWEN3
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "max_position_embeddings": 131_072,
    },
    "codellama-34b": QWEN3
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 22_016,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    },
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(name: str, directory: Path, *, layers: int = 0) -> Path:
    """config.json and a tokenizer for the shape `name`; `layers` cuts it to fewer."""
    config = dict(SHAPES[name])
    if layers:
        config["num_hidden_layers"] = layers
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    settings |= {"chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    _write_tokenizer(config["vocab_size"], directory / "tokenizer.json")
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
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    args = parser.parse_args()
    print(write_model(args.shape, args.directory, layers=args.layers))


if __name__ == "__main__":
    main()
