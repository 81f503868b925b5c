"""Conversations in the chat templates of model families, and the tokens that end their answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from server.apis.openai.chat_schema import Message
from server.errors import RequestError
from server.prompt.call_traits import CallTraits
from server.prompt.template_messages import template_messages
from server.prompt.tokenizer import ChatTokenizer
from tests.support.families.model_families import (
    FAMILIES,
    WITH_TOOLS,
    load_family,
    write_family,
)
from tests.support.paths import ROOT

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "Weather?"},
]
LONG = "call_abcdefghijklmnopqrstuvwx"


def called(*names: str, ids: str = LONG, **more: Any) -> dict[str, Any]:
    calls = [
        {
            "id": f"{ids}{index}",
            "type": "function",
            "function": {"name": name, "arguments": '{"city": "Oslo"}'},
        }
        for index, name in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(index: int, content: str, ids: str = LONG) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"{ids}{index}", "content": content}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    return {name: load_family(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def prompt_of(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    """As the server renders it."""
    checked = [Message.model_validate(message) for message in messages]
    return tokenizer.render(template_messages(checked, tokenizer), **options)


def ends_of(tokenizer: ChatTokenizer) -> set[str]:
    return {tokenizer.tokenizer.id_to_token(id) or "" for id in tokenizer.eos_ids}


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("qwen3_moe", "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3_coder", "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen2_moe", "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"),
        ("mixtral", "<s> [INST] Be brief.\n\nHello [/INST] Hi.</s> [INST] Weather? [/INST]"),
        ("mixtral_8x22b", "<s>[INST] Hello[/INST] Hi.</s>[INST] Be brief.\n\nWeather?[/INST]"),
        ("gpt_oss", "<|start|>user<|message|>Weather?<|end|><|start|>assistant"),
        (
            "glm45",
            "<|user|>\nHello<|assistant|>\n<think></think>\nHi.<|user|>\nWeather?<|assistant|>",
        ),
        (
            "gemma3",
            "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi."
            "<end_of_turn>\n<start_of_turn>user\nWeather?<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_a_conversation_is_printed_as_the_family_was_trained(
    tokenizers: dict[str, ChatTokenizer], name: str, prompt: str
):
    text = prompt_of(tokenizers[name], CHAT)
    assert text.endswith(prompt) and "Be brief." in text
    assert "A greeting." not in text  # reasoning of an earlier question


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_and_their_results_stand_in_the_prompt_of_a_family_with_tools(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    messages = [*CHAT, called("weather"), result(0, "It is sunny.")]
    text = prompt_of(tokenizers[name], messages, tools=TOOLS)
    places = [text.rindex(word) for word in ("Weather?", "weather", "Oslo", "It is sunny.")]
    if name != "gpt_oss":  # which names the function before its result again
        assert places == sorted(places)
    assert all(tool["function"]["name"] in text for tool in TOOLS)
    assert "None" not in text, "content beside calls is null"


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_each_of_several_calls_is_printed_with_its_result(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    asked = called("weather", "now", reasoning_content="Two of them.")
    messages = [*CHAT, asked, result(1, "12:30"), result(0, "It is sunny.")]
    text = prompt_of(tokenizers[name], messages, tools=TOOLS)
    assert text.count("Oslo") == 2
    assert text.count("12:30") == text.count("It is sunny.") == 1
    assert text.count("Two of them.") == (FAMILIES[name].reasoning is not None)


def test_gpt_oss_reads_each_call_before_its_result(tokenizers: dict[str, ChatTokenizer]):
    asked = called("weather", "now", reasoning="Two of them.")
    messages = [*CHAT[1:2], asked, result(1, "12:30"), result(0, "Sun."), *CHAT[3:]]
    text = prompt_of(tokenizers["gpt_oss"], messages, tools=TOOLS)
    json = '<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Two of them.<|end|>"
        f"<|start|>assistant to=functions.weather{json}"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Sun."<|end|>'
        f"<|start|>assistant to=functions.now{json}"
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"12:30"<|end|>'
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant"
    )


def test_results_of_calls_with_one_id_are_taken_in_their_order(
    tokenizers: dict[str, ChatTokenizer],
):
    asked = called("weather", "now")
    for call in asked["tool_calls"]:
        call["id"] = "same"
    both = [{"role": "tool", "tool_call_id": "same", "content": text} for text in ("Sun.", "Noon.")]
    lost = {"role": "tool", "tool_call_id": "other", "content": "Lost."}
    text = prompt_of(tokenizers["gpt_oss"], [CHAT[1], asked, *both, lost], tools=TOOLS)
    found = re.findall(r'<\|start\|>functions\.(\w+) to=assistant[^"]*"([^"]*)"', text)
    assert found == [("weather", "Sun."), ("now", "Noon."), ("now", "Lost.")]


def test_gpt_oss_gets_the_date_and_its_effort(tokenizers: dict[str, ChatTokenizer]):
    text = tokenizers["gpt_oss"].render(CHAT[1:2], extra={"reasoning_effort": "high"})
    assert re.search(r"Current date: \d{4}-\d\d-\d\d\n\nReasoning: high\n", text)


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("qwen3_moe", "Hello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("glm45", "Hello/nothink<|assistant|>\n<think></think>"),
    ],
)
def test_reasoning_can_be_switched_off(
    tokenizers: dict[str, ChatTokenizer], name: str, closed: str
):
    text = tokenizers[name].render(CHAT[1:2], extra={"enable_thinking": False})
    assert text.endswith(closed)


def test_an_id_that_mistrals_template_does_not_take_becomes_one_of_nine_characters(
    tokenizers: dict[str, ChatTokenizer],
):
    messages = [*CHAT, called("weather", "now"), result(0, "Sun."), result(1, "Noon.")]
    text = prompt_of(tokenizers["mixtral_8x22b"], messages, tools=TOOLS)
    ids = re.findall(r'"(?:call_)?id": "([a-zA-Z0-9]*)"', text)
    assert len(ids) == 4 and len(ids[0]) == 9
    assert ids[:2] == ids[2:] and ids[0] != ids[1]
    assert text == prompt_of(tokenizers["mixtral_8x22b"], messages, tools=TOOLS)
    own = [*CHAT, called("now", ids="abcdefgh"), result(0, "Noon.", ids="abcdefgh")]
    assert prompt_of(tokenizers["mixtral_8x22b"], own, tools=TOOLS).count("abcdefgh0") == 2


def test_a_template_that_takes_conversations_as_they_are_gets_them_so(
    tokenizers: dict[str, ChatTokenizer],
):
    changed = {name for name, each in tokenizers.items() if each.call_traits != CallTraits()}
    assert changed == {"mixtral_8x22b", "gpt_oss", "glm45"}
    messages = [called("weather", "now"), result(0, "Sun."), {"role": "user", "content": "x"}]
    assert CallTraits().fitted(messages) == messages


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("gemma2", CHAT, "There is no role system"),
        ("gemma2", [CHAT[1], CHAT[1]], "must alternate"),
        ("gemma3", [CHAT[1], CHAT[1]], "must alternate"),
        ("mixtral", [CHAT[1], CHAT[0]], "the roles user and assistant"),
    ],
)
def test_what_a_template_refuses_is_said_in_its_own_words(
    tokenizers: dict[str, ChatTokenizer], name: str, messages: list[Any], words: str
):
    with pytest.raises(RequestError, match=f"refuses the messages: .*{words}.*change them") as info:
        prompt_of(tokenizers[name], messages)
    assert str(info.value.param) == "messages"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_ends_at_the_tokens_of_its_family(
    tokenizers: dict[str, ChatTokenizer], name: str
):
    assert ends_of(tokenizers[name]) == set(FAMILIES[name].ends)


def test_the_end_of_a_message_does_not_end_gpt_oss_even_if_its_files_say_so(tmp_path: Path):
    folder = write_family(tmp_path, "gpt_oss")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    tokenizer = ChatTokenizer.load(folder)
    end = tokenizer.tokenizer.token_to_id("<|end|>")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    assert ends_of(ChatTokenizer.load(folder)) == {"<|return|>", "<|call|>"}


def test_another_template_for_gpt_oss_has_the_end_tokens_of_its_files(tmp_path: Path):
    folder = write_family(tmp_path, "gpt_oss")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ends_of(ChatTokenizer.load(folder)) == {"<|return|>", "<|endoftext|>"}


def test_a_template_that_refuses_several_calls_gets_one_a_message(tmp_path: Path):
    folder = write_family(tmp_path, "qwen2_moe")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        "[{{ m.content }}{{ m.tool_calls[0].function.name }}]"
        "{% else %}[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
    )
    messages = [CHAT[1], called("weather", "now", content="So: "), result(0, "Sun.")]
    messages = [*messages, result(1, "Noon."), CHAT[3]]
    text = prompt_of(ChatTokenizer.load(folder), messages)
    assert text == "[user Hello][So: weather][tool Sun.][now][tool Noon.][user Weather?]"


def test_the_documentation_has_the_formats_of_each_family():
    text = (ROOT / "docs" / "formats.md").read_text("utf-8").split("## Model families")[1]
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")]
    said = [tuple(cell.strip(" `") or None for cell in row) for row in rows[1:11]]
    families = [family for name, family in FAMILIES.items() if name != "gemma3_tools"]
    assert said == [(family.tools, family.reasoning) for family in families]
