"""Text to ids and back: every split of the ids gives the text of decoding them at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from server.generation.detokenizer import Detokenizer, WindowDetokenizer
from server.prompt.tokenizer import ChatTokenizer, TokenizerError
from tests.support.examples import examples
from tests.support.server.fake_engine import write_tokenizer


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
def spm(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("spm")
    spm_tokenizer().save(str(folder / "tokenizer.json"))
    return ChatTokenizer.load(folder)


def text_chunks(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
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
    assert "".join(text_chunks(detokenizer, tokens, list(cuts))) == whole


@examples(200)
@given(text=text, cuts=cuts)
def test_a_text_chunk_never_ends_in_half_a_character(
    byte_level: ChatTokenizer, text: str, cuts: list[int]
):
    tokens = byte_level.encode(text)
    parts = text_chunks(byte_level.detokenizer(skip_special=False), tokens, list(cuts))
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
    assert "".join(text_chunks(spm.detokenizer(), tokens, list(cuts))) == whole


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
    assert "".join(text_chunks(detokenizer, tokens, [])) == spm.decode(tokens)
    assert max(decoded) < 100


def test_an_answer_keeps_the_space_that_follows_its_prompt(spm: ChatTokenizer):
    prompt, answer = spm.encode("hello"), spm.encode("hello world")[len(spm.encode("hello")) :]
    assert "".join(text_chunks(spm.detokenizer(prompt=prompt), answer, [])) == " world"
    assert "".join(text_chunks(spm.detokenizer(), answer, [])) == "world"


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
def test_a_broken_file_in_the_folder_of_the_tokenizer_is_named(
    tmp_path: Path, file: str, content: str
):
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
