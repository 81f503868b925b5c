"""The model's chat template, rendered in a sandbox.

A template is code of a model that prints text of a caller: it runs without access to attributes or
modules, its output has a length cap and its rendering a time limit (template_sandbox.py).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.runtime import Macro

from server.errors import FieldPath, RequestError
from server.prompt.template_sandbox import TemplateSandbox, in_time, time_limit

MAX_SECONDS = 10.0
MESSAGES = FieldPath("messages")
BLANK = "\t"  # behind the marker: it stays where the template does not trim contents
UNCONTINUED = (
    "{continue_final_message} needs a final message whose content the template prints as it is: "
    "give it some text"
)


class GenerationBlocks(Extension):
    """{% generation %} encloses training targets; for an answer it prints its body."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_body"), [], [], body)
        block.set_lineno(line)
        return block

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own filter this one does not escape HTML: models were trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """A compiled template and the special tokens it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = TemplateSandbox(
            {"tojson": _tojson},
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"],
        )
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)

    def mentions(self, word: str) -> bool:
        return word in self.source

    def searches_for(self, word: str) -> bool:
        """Whether it searches contents for the word, as for the end of reasoning."""
        quoted = (f"'{word}'", f'"{word}"')
        return any(
            form in self.source for each in quoted for form in (f"{each} in ", f"split({each}")
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        max_chars: int,
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text.  Raises RequestError if the template refuses the messages."""
        marked = list(messages)
        marker = f"[{secrets.token_hex(8)}]" if continue_final_message else ""
        if marker:
            marked[-1] = {**marked[-1], "content": f"{_final_text(marked[-1])}{marker}{BLANK}"}
        context = {
            **self._special_tokens,
            **extra,
            "messages": marked,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._generate(context, max_chars + len(marker) + len(BLANK))
        return _cut_at(text, marker, str(messages[-1]["content"])) if marker else text

    def _generate(self, context: Mapping[str, Any], max_chars: int) -> str:
        chunks: list[str] = []
        length = 0
        try:
            with time_limit(MAX_SECONDS):
                for chunk in self._template.generate(context):
                    chunks.append(chunk)
                    length += len(chunk)
                    if length > max_chars:
                        raise RequestError(
                            "the chat template made more than {} characters of the messages: "
                            "shorten them",
                            max_chars,
                            param=MESSAGES,
                        )
                    in_time()
        except RequestError:
            raise
        except TimeoutError:
            raise RequestError(
                "the model's chat template took over {:g} s: shorten the messages, or start the "
                "server with another --chat-template",
                MAX_SECONDS,
                param=MESSAGES,
            ) from None
        except TemplateError as error:
            raise RequestError(
                "the model's chat template refuses the messages: {}: change them, or start the "
                "server with another --chat-template",
                str(error.message).rstrip(". "),
                param=MESSAGES,
            ) from None
        except Exception as error:  # whatever template code can raise is the messages' fault here
            raise RequestError(
                "the model's chat template cannot render the messages ({}): check roles, their "
                "order and the contents",
                type(error).__name__,
                param=MESSAGES,
            ) from error
        return "".join(chunks)


def _final_text(message: Mapping[str, Any]) -> str:
    """The text that the model continues.  Raises RequestError if there is none."""
    text = str(message.get("content") or "")
    if not text.strip():
        raise RequestError(UNCONTINUED)
    return text


def _cut_at(text: str, marker: str, final: str) -> str:
    """`text` up to the marker behind the final message's content: the words alone may come again in
    what the template prints after them, as the `i` of `<|im_end|>` does.
    """
    place = text.rfind(marker)
    before = text[: max(place, 0)]
    # A template that trims contents would have dropped the space at the end, too.
    if not text.startswith(marker + BLANK, place):
        before = before.rstrip()
    if not before.rstrip().endswith(final.strip()):
        raise RequestError(UNCONTINUED)
    return before
