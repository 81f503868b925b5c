"""Builds the tokenizer of tiny-chat: byte-level BPE learned from generated conversations.

`python -m model_zoo.tiny_chat.training.tokenizer [OUT]` writes tokenizer.json,
tokenizer_config.json and generation_config.json into OUT (default: this folder).
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .data import conversation
from .dialogs import SHARES, dialog
from .rendering import CHAT_TEMPLATE, segments_of

VOCAB_SIZE = 4096
NUM_CONVERSATIONS = 100_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Plain text to a reader, one token each to the model.
RESERVED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# Of images.  Their ids are those of bytes that no UTF-8 has, which no text can use: so vocabulary
# and weights of the text model are the same with images and without.
IMAGE_TOKENS = {
    0xF5: "<|vision_start|>",
    0xF6: "<|vision_end|>",
    0xF7: "<|image_pad|>",
    0xF8: "<|video_pad|>",
}
# Words keep their leading space; every digit stands alone, so that sums are learned by column.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS = re.compile(r"<\|im_\w+\|>|</?think>|</?tool_call>")


def texts(count: int) -> Iterator[str]:
    random = Random("tokenizer")
    for _ in range(count):
        for message in conversation(random):
            yield message["content"]
    kinds = random.choices(list(SHARES), list(SHARES.values()), k=count // 4)
    for kind in kinds:
        for text, _ in segments_of(dialog(random, kind)):
            yield from MARKS.split(text)


def build(count: int = NUM_CONVERSATIONS) -> Tokenizer:
    """A tokenizer that encodes and decodes any UTF-8, byte by byte where it has to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(RESERVED),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(count), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in RESERVED])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return with_image_tokens(tokenizer)


def with_image_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same with IMAGE_TOKENS, which take the places of their bytes."""
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    for byte, token in IMAGE_TOKENS.items():
        # Such bytes are written as the letter of that number.
        vocabulary[token] = vocabulary.pop(chr(byte))
        entry = AddedToken(token, special=True, normalized=False)
        names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        described["added_tokens"].append(
            {"id": vocabulary[token], **{name: getattr(entry, name) for name in names}}
        )
    described["added_tokens"].sort(key=lambda one: one["id"])
    return Tokenizer.from_str(json.dumps(described))


def save(tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    end, message_end = (tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", *IMAGE_TOKENS.values()],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    # Greedy: every question has one right answer, so there is nothing to gain from sampling.
    generation = {
        "do_sample": False,
        "temperature": 0.0,  # what servers read; do_sample is what transformers reads
        "eos_token_id": [message_end, end],
        "pad_token_id": end,
    }
    for name, value in (("tokenizer_config", config), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    save(build(), Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
