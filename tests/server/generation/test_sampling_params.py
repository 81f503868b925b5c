"""A request's fields, the model's recommendations and the defaults, in this order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.messages import SamplingParams
from server.apis.openai.chat_schema import ChatRequest
from server.generation.sampling_params import sampling_params
from server.http.validation import parse
from server.prompt.tokenizer import ChatTokenizer
from tests.support.server.fake_engine import ready, write_tokenizer

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
RECOMMENDED = dict(zip(FIELDS, (0.6, 0.95, 20, 0.05, 1.1), strict=True))
ASKED = dict(zip(FIELDS, (0.0, 0.5, 0, 0.0, 1.0), strict=True))
NONE = dict(zip(FIELDS, (1.0, 1.0, 0, 0.0, 1.0), strict=True))
BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def params_of(tokenizer: ChatTokenizer, **fields: Any) -> SamplingParams:
    body = parse(ChatRequest, BODY | fields)
    return sampling_params(
        body, tokenizer, ready(), max_tokens=5, logprobs=None, prompt_logprobs=None
    )


@pytest.mark.parametrize(
    ("recommended", "asked", "expected"),
    [({}, {}, NONE), (RECOMMENDED, {}, RECOMMENDED), (RECOMMENDED, ASKED, ASKED)],
)
def test_the_request_goes_before_the_model_and_the_model_before_the_defaults(
    folder: Path, recommended: dict[str, float], asked: dict[str, float], expected: dict[str, float]
):
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    params = params_of(ChatTokenizer.load(folder), **asked)
    assert {name: getattr(params, name) for name in FIELDS} == expected


def test_a_request_without_parameters_has_the_engines_defaults(folder: Path):
    (folder / "generation_config.json").write_text("{}")
    tokenizer = ChatTokenizer.load(folder)
    assert params_of(tokenizer) == SamplingParams(5, stop_ids=tokenizer.eos_ids)
