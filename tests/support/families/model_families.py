"""Model families as their repositories describe them: chat template, special and end tokens.

The templates beside this file are our own, with the delimiters and the order of the public ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from server.prompt.tokenizer import ChatTokenizer
from tests.support.server.fake_engine import write_tokenizer

FOLDER = Path(__file__).parent
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
GLM += ("<|observation|>",)
HARMONY = ("<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>")
HARMONY += ("<|message|>", "<|call|>")


class Family(NamedTuple):
    """What a repository has, and the formats that its model writes."""

    tools: str | None
    reasoning: str | None
    special: tuple[str, ...]
    plain: tuple[str, ...]  # added tokens that are not special
    eos_token: str  # of tokenizer_config.json
    config: tuple[str, ...]  # end tokens of config.json
    generation: tuple[str, ...]  # of generation_config.json
    ends: tuple[str, ...]  # that end an answer


FAMILIES = {
    "qwen3_moe": Family(
        "hermes", "think", CHATML, THINKS, "<|im_end|>",
        ("<|im_end|>",), ("<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"),
    ),
    "qwen3_coder": Family(
        "qwen3_coder", None, CHATML, THINKS[2:], "<|im_end|>",
        ("<|im_end|>",), ("<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"),
    ),
    "qwen35": Family(
        "qwen3_coder", "think", CHATML, THINKS, "<|im_end|>",
        ("<|endoftext|>",), ("<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"),
    ),
    "qwen2_moe": Family(
        None, None, CHATML, (), "<|im_end|>",
        ("<|endoftext|>",), ("<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"),
    ),
    "mixtral": Family(None, None, ("<s>", "</s>"), (), "</s>", ("</s>",), ("</s>",), ("</s>",)),
    "mixtral_8x22b": Family(
        "mistral", None,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
         "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        (), "</s>", ("</s>",), ("</s>",), ("</s>",),
    ),
    # A copy from before <|call|> was added to its generation_config.json.
    "gpt_oss": Family(
        "harmony", "harmony", HARMONY, (), "<|return|>",
        ("<|return|>",), ("<|return|>", "<|endoftext|>"),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "glm45": Family(
        "glm45", "think", GLM,
        (*THINKS, "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "/nothink"),
        "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    # Its first copies name <eos> alone in both files.
    "gemma2": Family(
        None, None, GEMMA[:4], (), "<eos>", ("<eos>",), ("<eos>",), ("<eos>", "<end_of_turn>")
    ),
    "gemma3": Family(
        None, None, GEMMA, (), "<eos>", ("<eos>", "<end_of_turn>"), ("<eos>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
    ),
    "gemma3_tools": Family(
        "pythonic", None, GEMMA, (), "<eos>", ("<eos>", "<end_of_turn>"), (),
        ("<eos>", "<end_of_turn>"),
    ),
}  # fmt: skip
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.tools]
WITHOUT_TOOLS = [name for name, family in FAMILIES.items() if not family.tools]


def template_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text("utf-8")


def write_family(folder: Path, name: str) -> Path:
    """A directory with a small tokenizer that has the tokens of a family, and its other files."""
    family = FAMILIES[name]
    write_tokenizer(folder, template=None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in family.special])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in family.plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template_of(name), "utf-8")
    first = next((word for word in family.special if word in ("<s>", "<bos>")), None)
    words = {"eos_token": family.eos_token} | ({"bos_token": first} if first else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    for file, ends in (("config", family.config), ("generation_config", family.generation)):
        ids = [tokenizer.token_to_id(word) for word in ends]
        if ids:
            (folder / f"{file}.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def load_family(folder: Path, name: str) -> ChatTokenizer:
    return ChatTokenizer.load(write_family(folder, name))
