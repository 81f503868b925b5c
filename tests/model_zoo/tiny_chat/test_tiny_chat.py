"""The built-in model: its files, its tokenizer, its data and what it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import model_zoo.tiny_chat
from model_zoo.tiny_chat.training.data import conversation, questions
from model_zoo.tiny_chat.training.evaluate import answers, load
from model_zoo.tiny_chat.training.images.checkpoint import TOKENS
from model_zoo.tiny_chat.training.phrases import CHOICE, Phrasings
from model_zoo.tiny_chat.training.skills import SKILLS, Context, is_held
from model_zoo.tiny_chat.training.words import CAPITALS, FACTS, SMALL_TALK

FOLDER = Path(model_zoo.tiny_chat.__file__).parent
FILES = ["config", "generation_config", "preprocessor_config", "tokenizer", "tokenizer_config"]
BYTES = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(FOLDER, torch.float32).eval()
    torch.set_num_threads(threads)


def all_wordings(template: str) -> set[str]:
    match = CHOICE.search(template)
    if match is None:
        return {" ".join(template.split()).replace(" ,", ",").lower()}
    start, end = template[: match.start()], template[match.end() :]
    return set().union(*(all_wordings(start + word + end) for word in match[1].split("|")))


def wordings(templates: list[str]) -> set[str]:
    return set().union(*(all_wordings(template) for template in templates))


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_survives_encoding_and_decoding(text: str):
    assert BYTES.decode(BYTES.encode(text).ids, skip_special_tokens=False) == text


def test_numbers_are_spelled_digit_by_digit():
    assert len(BYTES.encode("4096").ids) == 4


def test_special_tokens_are_single_tokens():
    low = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    high = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert BYTES.encode("".join(low + high)).ids == [0, 1, 2, 4092, 4093, 4094, 4095]
    config = json.loads((FOLDER / "config.json").read_text())
    for field, token in TOKENS.items():
        assert BYTES.encode(token).ids == [config[field]], field


def test_the_model_fits_in_nineteen_megabytes():
    names = [*(f"{name}.json" for name in FILES), "model.safetensors"]
    assert sum((FOLDER / name).stat().st_size for name in names) <= 19_000_000


def test_config_and_tokenizer_agree_on_vocabulary_and_end():
    config = json.loads((FOLDER / "config.json").read_text())["text_config"]
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert config["vocab_size"] == BYTES.get_vocab_size()
    assert config["max_position_embeddings"] >= 2048
    ends = [BYTES.token_to_id("<|im_end|>"), BYTES.token_to_id("<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert config["eos_token_id"] == ends[0]


def test_it_is_greedy_unless_asked_otherwise():
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["temperature"] == 0
    assert generation["do_sample"] is False


def test_template_renders_a_conversation_of_several_turns(tokenizer: PreTrainedTokenizerFast):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    shorter = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == shorter + "<|im_start|>assistant\n"


def test_template_prints_images_where_they_stand(tokenizer: PreTrainedTokenizerFast):
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    parts = [{"type": "image"}, {"type": "text", "text": "Which digit?"}, {"type": "image"}]
    messages = [{"role": role, "content": parts} for role in ("user", "tool")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    shown = f"{image}Which digit?{image}"
    result = f"<tool_response>\n{shown}\n</tool_response>"
    assert text == "".join(f"<|im_start|>user\n{one}<|im_end|>\n" for one in (shown, result))


def test_template_refuses_a_role_it_does_not_know(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(Exception, match="not critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "42"}], tokenize=False)


@pytest.mark.parametrize("table", [FACTS, SMALL_TALK], ids=["facts", "small talk"])
def test_no_held_out_wording_is_trained(table: dict[str, Phrasings]):
    trained = set().union(*(wordings(phrasings.train) for phrasings in table.values()))
    held = set().union(*(wordings(phrasings.held) for phrasings in table.values()))
    assert held
    assert not trained & held


@pytest.mark.parametrize("table", [FACTS, SMALL_TALK], ids=["facts", "small talk"])
def test_every_wording_has_one_answer(table: dict[str, Phrasings]):
    seen: dict[str, str] = {}
    for answer, phrasings in table.items():
        for wording in wordings(phrasings.train + phrasings.held):
            assert seen.setdefault(wording, answer) == answer, wording


def test_it_knows_forty_facts_and_sixty_capitals():
    assert len(FACTS) >= 40
    assert len(CAPITALS) == 60


def sum_pair(answer: str) -> str:
    a, _, b = answer.split(" = ")[0].partition(" + ")
    return "+".join(str(n) for n in sorted((int(a), int(b))))


@pytest.mark.parametrize("held", [False, True])
def test_sums_keep_to_their_side_of_the_split(held: bool):
    random = Random(7)
    for _ in range(300):
        answer = SKILLS["sum"](random, held, Context()).answer
        assert is_held(sum_pair(answer)) == held


def test_training_asks_for_no_held_out_word_and_nothing_that_evaluation_asks():
    random = Random(11)
    for _ in range(300):
        word = SKILLS["repeat"](random, False, Context()).answer
        assert " " in word or not is_held(word)
    trained = {
        message["content"].lower()
        for _ in range(3000)
        for message in conversation(random)
        if message["role"] == "user"
    }
    for skill in ("facts", "sum", "capital", "repeat"):
        asked = {messages[-2]["content"].lower() for messages in questions(skill, 200)}
        assert not asked & trained, skill


ANSWERS = [
    ("Hello!", "Hello! How can I help you?"),
    ("Who are you?", "I am tiny-chat, the small built-in language model of Wavefill."),
    ("what's the default port of wavefill", "The default port is 8000."),
    ("What is 17 + 25?", "17 + 25 = 42."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("count to 12", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."),
    ("Count from 5 to 9.", "5, 6, 7, 8, 9."),
    ("Repeat the word banana.", "banana"),
    ("Repeat: 你好 🎉", "你好 🎉"),
    ("My name is Ana.", "Nice to meet you, Ana!"),
    ("What is 12 * 5?", "I don't know that."),
    ("What is the capital of Peru?", "I don't know that."),
    ("Who wrote Hamlet?", "I don't know that."),
    ("Thanks, bye!", "Goodbye! Have a nice day."),
]


def test_it_answers_one_question_of_every_skill(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
):
    prompts = [[{"role": "user", "content": question}] for question, _ in ANSWERS]
    assert answers(model, tokenizer, prompts) == [answer for _, answer in ANSWERS]


def test_it_follows_a_conversation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast):
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "My name is Ana."},
        {"role": "assistant", "content": "Nice to meet you, Ana!"},
        {"role": "user", "content": "What is the capital of Japan?"},
        {"role": "assistant", "content": "The capital of Japan is Tokyo."},
    ]
    asked = [
        [*messages, {"role": "user", "content": question}]
        for question in ("And of Italy?", "What is my name?")
    ]
    expected = ["The capital of Italy is Rome.", "Your name is Ana."]
    assert answers(model, tokenizer, asked) == expected
