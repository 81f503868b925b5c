"""`suffix`: filling in the middle, with the tokens that a model was trained to do it with."""

from __future__ import annotations

from typing import NamedTuple

from server.errors import UnsupportedParameter
from server.prompt.tokenizer import ChatTokenizer


class FimFormat(NamedTuple):
    """Words of the vocabulary around the text before the gap and that after it."""

    before: str
    after: str
    middle: str  # the answer begins behind it
    after_first: bool = False


FORMATS = (
    FimFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma
    FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimFormat(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),  # DeepSeek
    FimFormat("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    FimFormat("[PREFIX]", "[SUFFIX]", "", after_first=True),  # Codestral
)


def fill_format(tokenizer: ChatTokenizer) -> FimFormat | None:
    """How this model fills a gap; None if it cannot."""
    known = tokenizer.tokenizer.token_to_id
    for form in FORMATS:
        if all(known(word) is not None for word in form[:3] if word):
            return form
    return None


def prompt_with_gap(before: str, after: str, tokenizer: ChatTokenizer, model: str) -> str:
    """The prompt for the text between two others.  Raises UnsupportedParameter."""
    form = fill_format(tokenizer)
    if form is None:
        raise UnsupportedParameter(
            "{suffix}: the model `{}` has no tokens for filling a gap: put everything into "
            "{prompt}",
            model[:100],
        )
    first, second = form.before + before, form.after + after
    if form.after_first:
        first, second = second, first
    return first + second + form.middle
