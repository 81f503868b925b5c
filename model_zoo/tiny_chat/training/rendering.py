"""The chat template, and what it prints cut into pieces that are learned and pieces that are not.

Written twice because training needs the cuts, and tens of thousands of conversations a second: a
test holds the two together.
"""

import json

from .data import ChatMessage
from .dialogs import Dialog
from .functions import JsonValue

# Thinking is off unless the request turns it on; the prompt then ends within the reasoning.
CHAT_TEMPLATE = """\
{%- macro shown(content) %}
{%- if content is string %}
{{- content }}
{%- else %}
{%- for part in content or [] %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- set thinks = (reasoning_effort or 'none') not in ['none', 'minimal'] %}
{%- if enable_thinking is defined %}
{%- set thinks = enable_thinking %}
{%- endif %}
{%- set first = messages[0] if messages else {} %}
{%- set has_system = first.role in ['system', 'developer'] %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if has_system %}
{{- shown(first.content) ~ '\\n\\n' }}
{%- endif %}
{{- '# Tools\\n<tools>\\n' }}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{{- '{"name": ' ~ function.name | tojson }}
{%- if function.description %}
{{- ', "description": ' ~ function.description | tojson }}
{%- endif %}
{{- ', "parameters": ' ~ (function.parameters or {}) | tojson ~ '}\\n' }}
{%- endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'system' if message.role == 'developer' else message.role %}
{%- if role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('tiny-chat knows the roles system, developer, user, assistant and tool, not '
    ~ message.role) }}
{%- endif %}
{%- set content = shown(message.content) %}
{%- if role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user\\n' }}
{%- else %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif not (loop.first and has_system and tools) %}
{%- if role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' ~ role ~ '\\n' ~ content }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{%- if content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": ' ~ function.name | tojson ~ ', "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if thinks %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}
"""


def tool_line(function: JsonValue) -> str:
    described = {key: function[key] for key in ("name", "description") if function.get(key)}
    return json.dumps({**described, "parameters": function["parameters"]}, ensure_ascii=False)


def head_of(dialog: Dialog) -> tuple[str, list[ChatMessage]]:
    """What stands before the messages, and the messages that are left."""
    messages = dialog.messages
    if not dialog.tools:
        return "", messages
    system = ""
    if messages[0]["role"] == "system":
        system = messages[0]["content"] + "\n\n"
        messages = messages[1:]
    lines = "".join(tool_line(tool["function"]) + "\n" for tool in dialog.tools)
    return f"<|im_start|>system\n{system}# Tools\n<tools>\n{lines}</tools><|im_end|>\n", messages


def answer_text(message: ChatMessage) -> str:
    """What an assistant writes for this message."""
    calls = [
        "<tool_call>\n" + json.dumps(call["function"], ensure_ascii=False) + "\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    return "\n".join(([message["content"]] if message["content"] else []) + calls)


def values_only(text: str) -> list[tuple[str, bool]]:
    """A JSON object in pieces, of which its values are learned; keys and marks are not."""
    segments: list[tuple[str, bool]] = []
    before = "{"
    for key, value in json.loads(text).items():
        quote = '"' if isinstance(value, str) else ""
        written = json.dumps(value, ensure_ascii=False).strip('"')
        segments += [(f"{before}{json.dumps(key)}: {quote}", False), (written, True)]
        before = quote + ", "
    return [*segments, (before.removesuffix(", ") + "}", False)]


def segments_of(dialog: Dialog) -> list[tuple[str, bool]]:
    """The rendered dialog in pieces; True marks what the model must learn to write."""
    before, messages = head_of(dialog)
    segments: list[tuple[str, bool]] = []
    for index, message in enumerate(messages):
        role, last = message["role"], index == len(messages) - 1
        if role == "tool":
            first = messages[index - 1]["role"] != "tool"
            before += "<|im_start|>user\n" if first else "\n"
            before += f"<tool_response>\n{message['content']}\n</tool_response>"
            before += "<|im_end|>\n" if messages[index + 1]["role"] != "tool" else ""
        elif role == "assistant":
            reasoning = ""
            before += "<|im_start|>assistant\n"
            if last and dialog.thinking:
                before, reasoning = before + "<think>\n", f"{dialog.reasoning}\n</think>\n\n"
            segments.append((before, False))
            if last and dialog.keys_given:
                segments += [*values_only(message["content"]), ("<|im_end|>", True)]
            else:
                segments.append((reasoning + answer_text(message) + "<|im_end|>", True))
            before = "\n"
        else:
            before += f"<|im_start|>{role}\n{message['content']}<|im_end|>\n"
    return segments
