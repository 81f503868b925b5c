"""Chat templates: what they render, which file they come from, and their limits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from server.errors import RequestError
from server.prompt.tokenizer import ChatTokenizer, TokenizerError
from tests.support.server.fake_engine import TEMPLATE, write_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_template_makes_the_prompt(byte_level: ChatTokenizer):
    assert byte_level.render(HELLO) == "<|user|>Hello<|end|><|assistant|>"
    assert byte_level.render(HELLO, add_generation_prompt=False) == "<|user|>Hello<|end|>"


def test_a_final_message_can_be_continued(byte_level: ChatTokenizer):
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    text = byte_level.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|user|>Hello<|end|><|assistant|>Well, "


@pytest.mark.parametrize("text", ["e", "d|", "<", ">", "|end|", "assistant", "a<|end|>b", " i"])
def test_a_continued_message_may_end_like_the_delimiter_behind_it(
    byte_level: ChatTokenizer, text: str
):
    messages = [*HELLO, {"role": "assistant", "content": text}]
    prompt = byte_level.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == f"<|user|>Hello<|end|><|assistant|>{text}"


def test_a_template_that_trims_contents_trims_what_is_continued(tmp_path: Path):
    trimming = with_template(
        tmp_path, "{% for m in messages %}[{{ m.content | trim }} ]{% endfor %}"
    )
    messages = [*HELLO, {"role": "assistant", "content": " Well, \n"}]
    assert trimming.render(messages, continue_final_message=True) == "[Hello ][Well,"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ messages[-1].content | upper }}"]
)
@pytest.mark.parametrize("text", ["", " \n", "Well"])
def test_a_message_that_is_not_printed_as_it_is_cannot_be_continued(
    tmp_path: Path, source: str, text: str
):
    changed = with_template(tmp_path, source)
    messages = [*HELLO, {"role": "assistant", "content": text}]
    with pytest.raises(RequestError, match="as it is"):
        changed.render(messages, continue_final_message=True)


def with_template(tmp_path: Path, template: str) -> ChatTokenizer:
    return ChatTokenizer.load(write_tokenizer(tmp_path, template=template))


def test_a_template_has_the_functions_that_transformers_gives_it(tmp_path: Path):
    source = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}"
    )
    text = with_template(tmp_path, source).render([{"role": "user", "content": "<\u00e9>"}] * 2)
    assert text == '{"role": "user", "content": "<\u00e9>"}<|end|>4'


REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>"
    "{% if enable_thinking is false %}</think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("thinking", "begins"),
    [(True, "<|assistant|><think>"), (False, "<|assistant|><think></think>")],
)
def test_what_a_template_adds_for_the_answer_is_counted(
    tmp_path: Path, thinking: bool, begins: str
):
    tokenizer, options = with_template(tmp_path, REASONING), {"enable_thinking": thinking}
    said = [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]
    text = tokenizer.render(said, extra=options)
    count = tokenizer.generation_prompt_len(text, options)
    prompt = tokenizer.encode_prompt(text)
    assert tokenizer.decode(prompt[-count:], skip_special=False) == begins
    # What comes before is what the next prompt has, too.
    said += [{"role": "assistant", "content": "Good"}, *HELLO]
    following = tokenizer.encode_prompt(tokenizer.render(said, extra=options))
    assert following[: len(prompt) - count] == prompt[:-count]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% if add_generation_prompt %}now: {% endif %}{{ messages[0].content }}",
        "{{ raise_exception('it wants more') if messages | length < 2 }}{{ messages[0].content }}",
    ],
)
def test_without_tokens_that_begin_the_answer_none_are_counted(tmp_path: Path, source: str):
    tokenizer = with_template(tmp_path, source)
    text = tokenizer.render([*HELLO, *HELLO])
    assert tokenizer.generation_prompt_len(text) == 0


def test_a_template_file_wins_over_the_configured_template(tmp_path: Path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert ChatTokenizer.load(tmp_path).render(HELLO) == "from a file"


def test_the_operators_template_wins_over_the_models(tmp_path: Path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the model")
    (tmp_path / "own.jinja").write_text("from the operator")
    tokenizer = ChatTokenizer.load(tmp_path, chat_template=tmp_path / "own.jinja")
    assert tokenizer.render(HELLO) == "from the operator"
    with pytest.raises(TokenizerError, match="--chat-template"):
        ChatTokenizer.load(tmp_path, chat_template="missing.jinja")


def test_of_named_templates_the_default_one_is_used(tmp_path: Path):
    write_tokenizer(tmp_path)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    config = json.dumps({"chat_template": named})
    (tmp_path / "tokenizer_config.json").write_text(config)
    assert ChatTokenizer.load(tmp_path).render(HELLO) == "yes"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_a_template_that_misbehaves_ends_its_own_request_only(tmp_path: Path, source: str):
    with pytest.raises(RequestError, match="template"):
        with_template(tmp_path, source).render(HELLO, max_chars=10_000)


MANY = "(range(10**5) | list)"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
        # Lists, and neither output nor calls within the loops.
        "{% set many = " + MANY + " %}{% for a in many %}{% for b in many %}{% for c in many %}"
        "{% set d = c %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set many = " + MANY + " %}"
        "{% for a in many if many[0] %}{% endfor %}"
        "{% for a in many %}{% for b in many if b > 10**9 %}{% endfor %}{% endfor %}",
        "{% set many = " + MANY + " %}{% for a in many recursive %}"
        "{% if loop.depth < 9 %}{% set b = loop(many) %}{% endif %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{% set a = twice(n - 1) ~ twice(n - 1) %}{% endif %}"
        "{% endmacro %}{% set a = twice(60) %}",
        "{% set many = " + MANY + " %}{{ ([many] * 10**5) | map('sum') | sum }}",
        "{% set many = " + MANY + " %}{{ many | select('in', many[::-1]) | list | length }}",
        "{% set l = namespace(all=" + MANY + ") %}{% for a in l.all %}"
        "{% for b in l.all %}{% set l.last = b %}{% endfor %}{% endfor %}",
        # What a template calls so does not stop the clock.
        "{% macro in_time() %}1{% endmacro %}{% set many = " + MANY + " %}"
        "{% for a in many %}{% for b in many %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_computes_without_end_ends_at_its_time_limit(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("server.prompt.chat_template.MAX_SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"chat template took over 0\.2 s.*--chat-template"):
        with_template(tmp_path, source).render(HELLO)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ ('a' * 10**10) | length }}", "`*` would make"),
        ("{{ ([0] * 10**10) | length }}", "`*` would make"),
        ("{{ 10**10 * 'a' }}", "`*` would make"),
        ("{% set a = 7 ** 100000000 %}", "`**` would make"),
        ("{% set a = 2 ** 500000 %}{% set a = a * a * a %}", "`*` would make"),
        ("{% set a = 'a' * 10**6 %}" + "{% set a = a + a %}" * 30, "`+` would make"),
        ("{% set a = 'a' * 10**6 %}" + "{% set a = a ~ a %}" * 30, "`~` would make"),
        ("{{ '%9999999999d' % 1 }}", "a width"),
        ("{{ '%*d' % (10**10, 1) }}", "a width"),
        ("{{ '%9999999999d' | format(1) }}", "a width"),
        ("{{ '{:9999999999}'.format(1) }}", "a width"),
        ("{{ '{:{w}}'.format(1, w=10**10) }}", "a width"),
        ("{{ '{x:{w}}'.format_map({'x': 1, 'w': 10**10}) }}", "a width"),
        ("{{ 'a'.ljust(10**10) }}", "a width"),
        ("{{ 'a' | center(10**10) }}", "a width"),
        ("{{ 'a' | indent(10**10, true) }}", "a width"),
        ("{{ [1] | tojson(indent=10**10) }}", "a width"),
        ("{{ [1] | slice(10**10) | list | length }}", "a width"),
        ("{{ lipsum(n=10**9) }}", "is undefined"),
    ],
)
def test_an_operation_of_a_template_that_would_make_too_much_is_not_begun(
    tmp_path: Path, source: str, words: str
):
    with pytest.raises(RequestError, match=f"the model's chat template .*(?:{re.escape(words)})"):
        with_template(tmp_path, source).render(HELLO)


def test_loops_filters_and_operators_of_a_template_make_what_jinja2_makes_of_them(tmp_path: Path):
    source = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}"
        "{{ loop.last }}{{ m.content ~ 1 ~ none }}{% else %}nobody{% endfor %}|"
        "{% for n in [1, [2, [3]]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}|"
        "{{ '%03d' % 7 }}{{ '{:>4}'.format('b') }}{{ 'ab' * 2 + 'c' }}{{ 2 ** 10 + 5 * 3 % 4 }}"
        "{{ [3, 1] | sort | map('string') | join(',') }}{{ 'x' | indent(2, true) }}"
        "{{ [1] + [2] }}{{ 'x'.center(3) }}{{ 1754000000 | tojson }}{{ '{1754000000} %d' % 1 }}"
    )
    text = with_template(tmp_path, source).render([{"role": "user", "content": "hi"}])
    assert text == "1/1Truehi1None|123|007   bababc10271,3  x[1, 2] x 1754000000{1754000000} 1"


def test_a_model_without_a_template_loads_and_refuses_messages(tmp_path: Path):
    tokenizer = ChatTokenizer.load(write_tokenizer(tmp_path, template=None))
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.render(HELLO)
    assert caught.value.code == "no_chat_template"


def test_the_template_mentions_what_it_can_do(byte_level: ChatTokenizer):
    assert byte_level.template is not None
    assert byte_level.template.mentions("role") and "role" in TEMPLATE
    assert not byte_level.template.mentions("tool_calls")
