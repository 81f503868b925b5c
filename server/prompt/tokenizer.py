"""ChatTokenizer: a model directory's tokenizer, chat template, end tokens and sampling defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from jinja2 import TemplateError
from msgspec import Meta, Struct
from tokenizers import Tokenizer

from server.errors import RequestError
from server.generation.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_table,
)
from server.http.validation import fields_of
from server.prompt.call_traits import CallTraits
from server.prompt.chat_template import ChatTemplate
from server.prompt.end_tokens import EndTokens, end_ids
from server.prompt.special_tokens import MAX_GROWTH, ControlTokens

T = TypeVar("T")

REPAIR = "correct it, or download it again"
SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
END_FILES = ("generation_config.json", "config.json")
ONE_MESSAGE = ({"role": "user", "content": "Hello"},)
CONTEXT_TOKENS = 6  # prompt tokens that a detokenizer decodes, to know what precedes the answer


class TokenizerError(ValueError):
    """The directory has no usable tokenizer; the message names the file and the remedy."""


class SamplingDefaults(Struct, frozen=True):
    """What generation_config.json recommends; None where it has no value."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


class NamedTemplate(Struct, frozen=True):
    name: str
    template: str


class TokenizerConfig(Struct, frozen=True):
    """The part of tokenizer_config.json that names the chat template."""

    chat_template: str | list[NamedTemplate] | None = None


class Decoder(Struct, frozen=True):
    """The decoder of tokenizer.json, which may be a list of decoders."""

    type: str = ""
    decoders: list[Decoder] = []

    def is_byte_level(self) -> bool:
        if self.type == "Sequence" and len(self.decoders) == 1:
            return self.decoders[0].is_byte_level()
        return self.type == "ByteLevel"


class TokenizerFile(Struct, frozen=True):
    decoder: Decoder | None = None


@dataclass(frozen=True)
class KeptTokens:
    """Special tokens that stay in the text of an answer, such as delimiters of tool calls."""

    ids: frozenset[int]
    table: list[bytes] | None  # ChatTokenizer.bytes_plain, and their bytes


@dataclass(frozen=True)
class ChatTokenizer:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    special_ids: frozenset[int]
    longest_token: int  # characters
    bytes_all: list[bytes] | None  # by token id; None if the tokenizer is not byte-level
    bytes_plain: list[bytes] | None  # bytes_all without special tokens
    control_tokens: ControlTokens | None = None  # None: messages may hold special tokens
    call_traits: CallTraits = field(default_factory=CallTraits)

    @staticmethod
    def load(
        directory: str | Path,
        *,
        chat_template: str | Path = "",
        special_in_content: Literal["allow", "text"] = "allow",
    ) -> ChatTokenizer:
        """Read tokenizer.json and the files next to it.  Raises TokenizerError.

        chat_template        a file that takes the place of the model's own template
        special_in_content   "text": special tokens that a message spells are ordinary text
        """
        folder = Path(directory)
        tokenizer = _read_tokenizer(folder)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(id for id, token in added.items() if token.special)
        config = _read(folder / "tokenizer_config.json", TokenizerConfig)
        words = _special_words(folder)
        template = _read_template(folder, config, words, chat_template)
        decoder = _read(folder / "tokenizer.json", TokenizerFile).decoder or Decoder()
        table = byte_table(tokenizer) if decoder.is_byte_level() else None
        control = ControlTokens(tokenizer, template) if special_in_content == "text" else None
        return ChatTokenizer(
            tokenizer=tokenizer,
            template=template,
            eos_ids=end_ids(
                [_read(folder / name, EndTokens) for name in END_FILES],
                words.get("eos_token"),
                vocabulary,
                None if template is None else template.source,
            ),
            defaults=_read(folder / "generation_config.json", SamplingDefaults),
            special_ids=special,
            longest_token=max(map(len, vocabulary), default=1),
            bytes_all=table,
            bytes_plain=table and [b"" if i in special else b for i, b in enumerate(table)],
            control_tokens=control,
            call_traits=CallTraits.of(template),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.  Releases the GIL, so that a thread can encode long texts."""
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of the text that `render` returned."""
        if self.control_tokens is not None:
            return self.control_tokens.encode(text)
        return self.encode(text, add_special_tokens=False)

    @property
    def max_growth(self) -> int:
        """How many times longer than its characters `render` may make a text."""
        return 1 if self.control_tokens is None else MAX_GROWTH

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def detokenizer(
        self,
        *,
        skip_special: bool = True,
        prompt: Sequence[int] = (),
        kept: KeptTokens | None = None,
    ) -> Detokenizer:
        """kept: special tokens that are part of the text even if others are skipped."""
        table = self.bytes_plain if skip_special else self.bytes_all
        if kept is not None and kept.ids and skip_special:
            table, skip_special = kept.table, False
        if table is not None:
            return ByteDetokenizer(table)
        return WindowDetokenizer(self.tokenizer, skip_special, list(prompt[-CONTEXT_TOKENS:]))

    def special_words(self) -> dict[int, str]:
        """The special tokens by id."""
        return {id: word for id in self.special_ids if (word := self.tokenizer.id_to_token(id))}

    def added_words(self) -> dict[int, str]:
        """The added tokens that are not special, by id."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {id: token.content for id, token in added.items() if id not in self.special_ids}

    def kept_tokens(self, is_kept: Callable[[str], bool]) -> KeptTokens:
        """The special tokens whose words are kept; takes as long as the vocabulary."""
        ids = frozenset(id for id, word in self.special_words().items() if is_kept(word))
        if self.bytes_plain is None or self.bytes_all is None:
            return KeptTokens(ids, None)
        table = list(self.bytes_plain)
        for id in ids:
            table[id] = self.bytes_all[id]
        return KeptTokens(ids, table)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may end within a character."""
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
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation.  Raises RequestError if the template cannot render it."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template, so it cannot take {messages}: use "
                "/v1/completions with a `prompt`",
                code="no_chat_template",
            )
        if self.control_tokens is not None:
            messages = self.control_tokens.messages(messages)
            tools = self.control_tokens.escaped(tools)
            extra = self.control_tokens.options(extra)
        return self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            max_chars=max_chars * self.max_growth,
            extra=extra or {},
            tools=tools,
        )

    def generation_prompt_len(self, text: str, extra: Mapping[str, Any] | None = None) -> int:
        """Of a text of `render`, the tokens that the template adds for the answer to begin with.

        As one message shows that is rendered with and without them; 0 if `text` ends otherwise.
        """
        try:
            plain = self.render(ONE_MESSAGE, add_generation_prompt=False, extra=extra)
            begun = self.render(ONE_MESSAGE, extra=extra)
        except RequestError:  # the template wants other messages
            return 0
        added = begun.removeprefix(plain) if begun.startswith(plain) else ""
        return len(self.encode_prompt(added)) if added and text.endswith(added) else 0


def _read(path: Path, kind: type[T]) -> T:
    """The fields of `kind` in a JSON file; their defaults if there is no such file."""
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise TokenizerError(f"{path} cannot be used: {error}: {REPAIR}") from None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        slow = [name for name in SLOW_FILES if (folder / name).is_file()]
        found = f" (only {', '.join(slow)})" if slow else ""
        raise TokenizerError(
            f"{folder} has no tokenizer.json{found}: convert the tokenizer once with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    text = _read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every bad file
        raise TokenizerError(f"{path} cannot be read: {error}: {REPAIR}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_words(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, ... as a template sees them."""
    config = _read(folder / "tokenizer_config.json", dict[str, Any])
    words = {key: fields_of(value).get("content", value) for key, value in config.items()}
    return {
        key: word for key, word in words.items() if key.endswith("_token") and isinstance(word, str)
    }


def _read_template(
    folder: Path, config: TokenizerConfig, words: Mapping[str, str], override: str | Path
) -> ChatTemplate | None:
    path = Path(override) if override else folder / "chat_template.jinja"
    source = config.chat_template
    if isinstance(source, list):
        source = {entry.name: entry.template for entry in source}.get("default")
    if override and not path.is_file():
        raise TokenizerError(f"there is no chat template file {path}: check --chat-template")
    if path.is_file():
        source = _read_text(path)
    else:
        path = folder / "tokenizer_config.json"
    try:
        return None if source is None else ChatTemplate(source, words)
    except TemplateError as error:
        raise TokenizerError(
            f"the chat template in {path} is broken: {str(error).rstrip('.')}: correct it, or give "
            "another by --chat-template"
        ) from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is no UTF-8 text: {error}") from None
