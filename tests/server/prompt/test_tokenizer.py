"""Text to ids and back: every split of the ids gives the text of decoding them at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from server.errors import RequestError
from server.generation.detokenizer import Detokenizer, WindowDetokenizer
from server.prompt.tokenizer import ChatTokenizer, TokenizerError
from tests.support.examples import examples
from tests.support.server.fake_engine import TEMPLATE, write_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def spm_tokenizer() -> Tokenizer:
    """A tokenizer as of Llama 2: spaces as U+2581, unknown characters as bytes."""
    words = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    words += ["\u2581", *"abcdehlorw", "\u2581he", "ll", "\u2581wo", "\u00f6"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: place for place, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> ChatTokenizer:
    tokenizer = ChatTokenizer.load(folder)
    tokenizer.tokenizer.add_tokens(["a word with spaces", "w\u00f6rd"])
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("spm")
    spm_tokenizer().save(str(folder / "tokenizer.json"))
    return ChatTokenizer.load(folder)


def pieces(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    texts: list[str] = []
    while tokens:
        size = max(1, cuts.pop()) if cuts else 1
        texts.append(detokenizer.feed(tokens[:size]))
        tokens = tokens[size:]
    return [*texts, detokenizer.flush()]


ids = st.lists(st.integers(0, 380), max_size=40)
cuts = st.lists(st.integers(1, 9), max_size=20)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@examples(300)
@given(tokens=ids, cuts=cuts, skip=st.booleans())
def test_any_split_of_any_ids_gives_the_text_of_all_at_once(
    byte_level: ChatTokenizer, tokens: list[int], cuts: list[int], skip: bool
):
    detokenizer = byte_level.detokenizer(skip_special=skip)
    whole = byte_level.decode(tokens, skip_special=skip)
    assert "".join(pieces(detokenizer, tokens, list(cuts))) == whole


@examples(200)
@given(text=text, cuts=cuts)
def test_a_piece_never_ends_in_half_a_character(
    byte_level: ChatTokenizer, text: str, cuts: list[int]
):
    tokens = byte_level.encode(text)
    parts = pieces(byte_level.detokenizer(skip_special=False), tokens, list(cuts))
    assert "".join(parts) == text
    assert parts[-1] == "", "a text of whole characters left something behind"
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


@examples(200)
@given(text=text.map(lambda text: text.replace("\ufffd", "")), cuts=cuts)
def test_a_decoder_of_another_kind_gives_the_same_text_for_every_split(
    spm: ChatTokenizer, text: str, cuts: list[int]
):
    tokens = spm.encode(text)
    whole = spm.decode(tokens)
    assert "".join(pieces(spm.detokenizer(), tokens, list(cuts))) == whole


@pytest.mark.parametrize("word", ["</s>", "<0x80>"])
def test_tokens_that_make_no_text_are_not_decoded_again_and_again(spm: ChatTokenizer, word: str):
    """A model that says nothing but end tokens, or bytes that are no character."""
    token, hello = spm.tokenizer.token_to_id(word), spm.encode("hello")
    decoded: list[int] = []

    def decode(tokens: list[int], *, skip_special_tokens: bool) -> str:
        decoded.append(len(tokens))
        return spm.decode(tokens, skip_special=skip_special_tokens)

    watched = SimpleNamespace(decode=decode)
    detokenizer = WindowDetokenizer(watched, skip_special=True, context=[])  # type: ignore[arg-type]
    tokens = [*hello, *[token] * 500, *hello]
    assert "".join(pieces(detokenizer, tokens, [])) == spm.decode(tokens)
    assert max(decoded) < 100


def test_an_answer_keeps_the_space_that_follows_its_prompt(spm: ChatTokenizer):
    prompt, answer = spm.encode("hello"), spm.encode("hello world")[len(spm.encode("hello")) :]
    assert "".join(pieces(spm.detokenizer(prompt=prompt), answer, [])) == " world"
    assert "".join(pieces(spm.detokenizer(), answer, [])) == "world"


def test_a_cut_character_becomes_one_replacement_at_the_end(byte_level: ChatTokenizer):
    tokens = byte_level.encode("\N{WAVING HAND SIGN}")
    assert len(tokens) > 1
    detokenizer = byte_level.detokenizer()
    assert detokenizer.feed(tokens[:-1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for(byte_level: ChatTokenizer):
    tokens = byte_level.encode("<|user|>Hello<|end|>")
    assert byte_level.detokenizer().feed(tokens) == "Hello"
    assert byte_level.detokenizer(skip_special=False).feed(tokens) == "<|user|>Hello<|end|>"


def test_ids_beyond_the_vocabulary_have_no_text(byte_level: ChatTokenizer):
    assert byte_level.detokenizer().feed([5000]) == ""
    assert byte_level.detokenizer().feed([5000, 5001]) == ""
    assert byte_level.token_bytes(5000) == b""


@examples(100)
@given(text=text)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(byte_level: ChatTokenizer, text: str):
    tokens = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, tokens)) == text.encode()


def test_a_byte_token_has_its_byte(spm: ChatTokenizer):
    tokens = spm.encode("\u20ac")
    assert b"".join(map(spm.token_bytes, tokens)) == b" \xe2\x82\xac"


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


def test_end_tokens_come_from_all_files_that_name_them(tmp_path: Path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ChatTokenizer.load(tmp_path).eos_ids == (0, 5, 7, 9)


def test_sampling_defaults_come_from_generation_config(tmp_path: Path):
    write_tokenizer(tmp_path)
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    defaults = ChatTokenizer.load(tmp_path).defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 0.95)
    assert (defaults.min_p, defaults.repetition_penalty) == (None, None)


def test_a_file_that_cannot_be_read_is_named_with_its_path(tmp_path: Path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=f"^{tmp_path}/chat_template.jinja is no UTF-8 text"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(TokenizerError, match=f"^{tmp_path}/generation_config.json cannot be used"):
        ChatTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (None, "", "has no tokenizer.json: convert"),
        ("tokenizer.model", "x", "only tokenizer.model"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer.json", "{}", "cannot be read"),
    ],
)
def test_a_folder_without_a_fast_tokenizer_says_what_to_do(
    tmp_path: Path, file: str | None, content: str, words: str
):
    if file is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=words):
        ChatTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", "["),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", '{"top_p": 7}'),
        ("config.json", '{"eos_token_id": "x"}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
    ],
)
def test_a_broken_file_beside_the_tokenizer_is_named(tmp_path: Path, file: str, content: str):
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=file):
        ChatTokenizer.load(tmp_path)


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(ChatTokenizer.load(tmp_path).encode("Hello, world!")) == 4


def test_the_template_mentions_what_it_can_do(byte_level: ChatTokenizer):
    assert byte_level.template is not None
    assert byte_level.template.mentions("role") and "role" in TEMPLATE
    assert not byte_level.template.mentions("tool_calls")
