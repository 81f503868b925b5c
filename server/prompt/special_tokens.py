"""`--special-tokens-in-content text`: what a caller wrote does not become a special token.

A chat template prints one text, in which its own `<|im_start|>` and one of a message's content look
alike.  So the caller's strings are escaped before rendering: a separator stands behind the first
character of each word that would become a special token.  The tokenizer of the prompt has the
separator as a special token, takes the text around it as ordinary text, and its id is removed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from server.prompt.chat_template import ChatTemplate

# Two noncharacters of Unicode, and different ones: a caller's own separator is broken up, too.
SEPARATOR = "\ufdd0\ufdd1"
MAX_GROWTH = 1 + len(SEPARATOR)  # times: a separator for each character
COMPARED = ("role", "type")  # fields whose words templates compare with theirs


def _control_tokens(tokenizer: Tokenizer, template: ChatTemplate | None) -> set[str]:
    """The words of text that control the model.

    They are the special tokens and those other added tokens that the template names: DeepSeek does
    not declare its role tokens as special.  Many more added tokens are ordinary text, such as
    runs of spaces and HTML tags.
    """
    return {
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special
        or (token.content.strip() and template is not None and template.mentions(token.content))
    }


class ControlTokens:
    """Escapes callers' strings, and encodes the prompt in which they stand."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        # No single character: it cannot be broken up.
        self._words = {w for w in _control_tokens(tokenizer, template) if len(w) > 1} | {SEPARATOR}
        self._longest = max(map(len, self._words))
        self._find = re.compile(_first_characters(self._words))
        self._beginnings = {word[:end] for word in self._words for end in range(1, len(word))}
        self._endings = {word[start:] for word in self._words for start in range(1, len(word))}
        # A template that prints a name in angle brackets makes <think> of the name `think`.
        self._inside = {part for word in self._words for part in re.findall(r"\w+", word)}
        # Templates split the reasoning of earlier answers from their contents by these.
        searched = {w for w in self._words if template is not None and template.searches_for(w)}
        self._find_in_answers = re.compile(_first_characters(self._words - searched))
        # A copy: other users of the tokenizer must not see a token that the model does not have.
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        separator = AddedToken(SEPARATOR, special=True, normalized=False)
        self._tokenizer.add_special_tokens([separator])  # pyright: ignore[reportUnknownMemberType]
        self._separator = self._tokenizer.token_to_id(SEPARATOR)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return [id for id in encoding.ids if id != self._separator]

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a conversation, all text in them escaped."""
        copies: list[dict[str, Any]] = self.escaped(messages)
        for copy, message in zip(copies, messages, strict=True):
            content = message.get("content")
            if message["role"] == "assistant" and isinstance(content, str):
                copy["content"] = self._text(content, self._find_in_answers)
        return copies

    def escaped(self, value: Any) -> Any:
        """A copy of the value with all strings in it escaped, keys included."""
        if isinstance(value, str):
            return self._text(value, self._find)
        if isinstance(value, Mapping):
            entries = cast("Mapping[str, Any]", value).items()
            return {
                key if _is_word(key) else self._text(key, self._find): (
                    each if key in COMPARED and _is_word(each) else self.escaped(each)
                )
                for key, each in entries
            }
        if isinstance(value, list | tuple):
            return [self.escaped(each) for each in cast("Sequence[Any]", value)]
        return value

    def options(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """What callers set for a template, which compares words with its own: these stay."""
        entries = (options or {}).items()
        return {key: each if _is_word(each) else self.escaped(each) for key, each in entries}

    def _text(self, text: str, find: re.Pattern[str]) -> str:
        if not text or (_is_word(text) and text not in self._inside):
            return text
        places = {found.end() for found in find.finditer(text)}
        places |= self._edges(text)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return SEPARATOR.join(text[start:end] for start, end in pairwise(cuts))

    def _edges(self, text: str) -> set[int]:
        """Where to break what may become a word by what the template prints next to the text.

        Templates trim contents, so the edges are those of the trimmed text.
        """
        end = len(text.rstrip())
        start = min(len(text) - len(text.lstrip()), end)
        length = min(self._longest, end - start)
        places = {
            place + 1 for place in range(end - length, end) if text[place:end] in self._beginnings
        }
        ends = any(text[start:place] in self._endings for place in range(start + 1, start + length))
        inside = 0 < length < self._longest and any(text[start:end] in word for word in self._words)
        if ends or inside:
            places.add(start)
        return places


def _is_word(value: object) -> bool:
    """Whether templates may compare with it, or look it up: keys, roles, types."""
    return isinstance(value, str) and value.replace("_", "a").isalnum()


def _first_characters(words: Iterable[str]) -> str:
    """A pattern of the first character of any of the words, wherever one begins."""
    return "|".join(f"{first}(?={rest})" for first, rest in _by_first(words, _any_of))


def _any_of(words: Iterable[str]) -> str:
    """A pattern of any of the words; as fast for a thousand of them as for one."""
    if "" in words:
        return ""
    return "(?:" + "|".join(first + rest for first, rest in _by_first(words, _any_of)) + ")"


def _by_first(
    words: Iterable[str], pattern: Callable[[Iterable[str]], str]
) -> Iterable[tuple[str, str]]:
    rests: defaultdict[str, set[str]] = defaultdict(set)
    for word in words:
        rests[word[0]].add(word[1:])
    return ((re.escape(first), pattern(rest)) for first, rest in sorted(rests.items()))
