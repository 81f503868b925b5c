"""ChatTokenizer: a model directory's tokenizer, chat template, end tokens and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from server.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_table
from server.errors import RequestError
from server.template import ChatTemplate

SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
CONTEXT_TOKENS = 6  # prompt tokens that a detokenizer looks at, to know what precedes the answer


class TokenizerError(ValueError):
    """The directory has no usable tokenizer; the message names the file and the remedy."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class ChatTokenizer:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    special_ids: frozenset[int]
    longest_token: int  # characters
    bytes_all: list[bytes] | None  # by token id; None if the tokenizer is not byte-level
    bytes_plain: list[bytes] | None  # the same without special tokens

    @staticmethod
    def load(directory: str | Path) -> ChatTokenizer:
        """Read tokenizer.json and what stands beside it.  Raises TokenizerError."""
        folder = Path(directory)
        tokenizer = _read_tokenizer(folder)
        config = _read_json(folder / "tokenizer_config.json")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(id for id, token in added.items() if token.special)
        words = _special_words(config)
        table = byte_table(tokenizer) if _is_byte_level(folder) else None
        return ChatTokenizer(
            tokenizer=tokenizer,
            template=_read_template(folder, config, words),
            eos_ids=_eos_ids(folder, words, vocabulary),
            defaults=_sampling_defaults(folder),
            special_ids=special,
            longest_token=max(map(len, vocabulary), default=1),
            bytes_all=table,
            bytes_plain=table and [b"" if i in special else b for i, b in enumerate(table)],
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.  Releases the GIL, so that a thread can do it for long texts."""
        batch = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def detokenizer(self, *, skip_special: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        table = self.bytes_plain if skip_special else self.bytes_all
        if table is not None:
            return ByteDetokenizer(table)
        context = list(prompt[-CONTEXT_TOKENS:])
        return WindowDetokenizer(self.tokenizer, skip_special, context)

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for: often part of a character."""
        if self.bytes_all is not None:
            return self.bytes_all[token] if token < len(self.bytes_all) else b""
        word = self.tokenizer.id_to_token(token) or ""
        if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            return bytes.fromhex(word[3:5])
        return word.replace("\u2581", " ").encode()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int = 1 << 24,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.  Raises RequestError if the template cannot make it."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template, so it cannot take `messages`: use "
                "/v1/completions with a `prompt`",
                param="messages",
                code="no_chat_template",
            )
        return self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            max_chars=max_chars,
            extra=extra or {},
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path.name} is not a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType] -- JSON keys are strings


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        slow = [name for name in SLOW_FILES if (folder / name).is_file()]
        found = f" (only {', '.join(slow)})" if slow else ""
        raise TokenizerError(
            f"{folder} has no tokenizer.json{found}: convert the tokenizer once with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every bad file
        raise TokenizerError(f"{path.name} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_byte_level(folder: Path) -> bool:
    decoder = _read_json(folder / "tokenizer.json").get("decoder") or {}
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and inner and len(inner) == 1:
        decoder = inner[0]
    return decoder.get("type") == "ByteLevel"


def _special_words(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as a template sees them."""
    words: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token"):
            word = value.get("content") if isinstance(value, dict) else value  # pyright: ignore
            if isinstance(word, str):
                words[key] = word
    return words


def _read_template(
    folder: Path, config: Mapping[str, Any], words: Mapping[str, str]
) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source: Any = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in source}  # pyright: ignore
        source = named.get("default")
    return ChatTemplate(source, words) if isinstance(source, str) else None


def _eos_ids(
    folder: Path, words: Mapping[str, str], vocabulary: Mapping[str, int]
) -> tuple[int, ...]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        wanted = _read_json(folder / name).get("eos_token_id")
        ids.update(wanted if isinstance(wanted, list) else [] if wanted is None else [wanted])
    word = words.get("eos_token")
    if word in vocabulary:
        ids.add(vocabulary[word])
    return tuple(sorted(ids))


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    recommended = _read_json(folder / "generation_config.json")
    return SamplingDefaults(
        temperature=recommended.get("temperature"),
        top_p=recommended.get("top_p"),
        top_k=recommended.get("top_k"),
        min_p=recommended.get("min_p"),
        repetition_penalty=recommended.get("repetition_penalty"),
    )
