"""The error of each wrong request for embeddings: code, param and a message that helps."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.fake_engine import CONTEXT, HIDDEN, VOCAB, FakeServer
from tests.support.server.malformed_requests import REMOVED

EMBED = "/v1/embeddings"
SCORE = "/v1/score"
RERANK = "/v1/rerank"
BASE: dict[str, dict[str, Any]] = {
    EMBED: {"model": "fake", "input": "Hello"},
    SCORE: {"model": "fake", "text_1": "Hello", "text_2": ["Hello", "Bye"]},
    RERANK: {"model": "fake", "query": "Hello", "documents": ["Hello", "Bye"]},
}
MISSING = "missing_required_parameter"
TYPE = "invalid_type"
VALUE = "invalid_value"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
TOO_LONG = "context_length_exceeded"
NO_SIDES = {"text_1": REMOVED, "text_2": REMOVED}
LONG = "Hello, world! " * 400


# route, what is changed in a good body, code, param, words of the message; the status is 400
FIELDS: list[tuple[str, dict[str, Any], str, str, str]] = [
    # what all three share
    (EMBED, {"model": REMOVED}, MISSING, "model", "required"),
    (SCORE, {"model": 3}, TYPE, "model", "a string, not 3"),
    (RERANK, {"model": None}, TYPE, "model", "not null"),
    (EMBED, {"pooling": "cls"}, VALUE, "pooling", "'last' or 'mean'"),
    (SCORE, {"pooling": ""}, VALUE, "pooling", "'last'"),
    (RERANK, {"pooling": True}, VALUE, "pooling", "'mean'"),
    (EMBED, {"truncate_prompt_tokens": 0}, VALUE, "truncate_prompt_tokens", "at least 1"),
    (EMBED, {"truncate_prompt_tokens": -2}, VALUE, "truncate_prompt_tokens", "at least -1"),
    (SCORE, {"truncate_prompt_tokens": "5"}, TYPE, "truncate_prompt_tokens", "an integer"),
    (RERANK, {"truncate_prompt_tokens": 1.5}, TYPE, "truncate_prompt_tokens", "an integer"),
    (EMBED, {"truncation_side": "left"}, VALUE, "truncation_side", "truncate_prompt_tokens"),
    (EMBED, {"truncation_side": "top"}, VALUE, "truncation_side", "'left' or 'right'"),
    (EMBED, {"add_special_tokens": "no"}, TYPE, "add_special_tokens", "true or false"),
    (EMBED, {"priority": 2**31}, VALUE, "priority", "less than"),
    (SCORE, {"priority": "high"}, TYPE, "priority", "an integer"),
    (RERANK, {"cache_salt": ""}, VALUE, "cache_salt", "at least 1"),
    (EMBED, {"cache_salt": "x" * 129}, VALUE, "cache_salt", "at most 128"),
    (EMBED, {"user": 5}, TYPE, "user", "a string"),
    (EMBED, {"request_id": "x"}, UNSUPPORTED, "request_id", "X-Request-Id"),
    (EMBED, {"messages": []}, UNSUPPORTED, "messages", "send text"),
    (EMBED, {"padding": True}, UNSUPPORTED, "padding", "never padded"),
    (RERANK, {"instruction": "find"}, UNSUPPORTED, "instruction", "in front of the text"),
    # embeddings
    (EMBED, {"input": REMOVED}, MISSING, "input", "required"),
    (EMBED, {"input": None}, TYPE, "input", "a string, strings, token ids or lists"),
    (EMBED, {"input": 5}, TYPE, "input", "a string, strings"),
    (EMBED, {"input": {"text": "x"}}, TYPE, "input", "not an object"),
    (EMBED, {"input": ""}, VALUE, "input", "at least 1"),
    (EMBED, {"input": []}, VALUE, "input", "at least 1"),
    (EMBED, {"input": ["a", ""]}, VALUE, "input[1]", "at least 1"),
    (EMBED, {"input": ["a", 5]}, TYPE, "input[1]", "a string, not 5"),
    (EMBED, {"input": [5, "a"]}, TYPE, "input[1]", "an integer"),
    (EMBED, {"input": [5, 1.5]}, TYPE, "input[1]", "an integer"),
    (EMBED, {"input": [True]}, TYPE, "input[0]", "an integer"),
    (EMBED, {"input": [[]]}, VALUE, "input[0]", "at least 1"),
    (EMBED, {"input": [[1], []]}, VALUE, "input[1]", "at least 1"),
    (EMBED, {"input": [[1], "a"]}, TYPE, "input[1]", "an array"),
    (EMBED, {"input": [None]}, TYPE, "input[0]", "an integer"),
    (EMBED, {"input": ["a"] * 2049}, VALUE, "input", "at most 2048"),
    (EMBED, {"input": [[1]] * 2049}, VALUE, "input", "at most 2048"),
    (EMBED, {"input": [VOCAB]}, VALUE, "input", f"0 to {VOCAB - 1}"),
    (EMBED, {"input": [-1]}, VALUE, "input", "-1"),
    (EMBED, {"input": [[1], [2, VOCAB]]}, VALUE, "input[1]", str(VOCAB)),
    (EMBED, {"input": [10**30]}, TYPE, "input[0]", "an integer"),
    (EMBED, {"input": LONG}, TOO_LONG, "input", f"length is {CONTEXT} tokens. However, "),
    (EMBED, {"input": ["a", LONG]}, TOO_LONG, "input[1]", "shorten"),
    (EMBED, {"input": [[1], [1] * 999]}, TOO_LONG, "input[1]", "truncate_prompt_tokens"),
    (EMBED, {"input": [1] * (CONTEXT + 1)}, TOO_LONG, "input", f"{CONTEXT + 1} tokens"),
    (EMBED, {"input": "x" * 1_000_000}, TOO_LONG, "input", "1000000 characters"),
    (EMBED, {"encoding_format": "bytes"}, VALUE, "encoding_format", "'float' or 'base64'"),
    (EMBED, {"encoding_format": 1}, VALUE, "encoding_format", "'float'"),
    (EMBED, {"dimensions": 0}, VALUE, "dimensions", "at least 1"),
    (EMBED, {"dimensions": -3}, VALUE, "dimensions", "at least 1"),
    (EMBED, {"dimensions": 2.5}, TYPE, "dimensions", "an integer"),
    (EMBED, {"dimensions": HIDDEN + 1}, VALUE, "dimensions", f"have {HIDDEN}; lower it"),
    (EMBED, {"normalize": "yes"}, TYPE, "normalize", "true or false"),
    (EMBED, {"dimension": 5}, UNKNOWN, "dimension", "did you mean `dimensions`?"),
    (EMBED, {"temperature": 1}, UNKNOWN, "temperature", "remove it"),
    (EMBED, {"embed_dtype": "float16"}, UNSUPPORTED, "embed_dtype", "float32"),
    (EMBED, {"endianness": "big"}, UNSUPPORTED, "endianness", "little-endian"),
    (EMBED, {"use_activation": False}, UNSUPPORTED, "use_activation", "`normalize`"),
    (EMBED, {"input_type": "query"}, UNSUPPORTED, "input_type", "in front"),
    (EMBED, {"task": "retrieval.query"}, UNSUPPORTED, "task", "in front"),
    (EMBED, {"late_chunking": True}, UNSUPPORTED, "late_chunking", "chunks"),
    (EMBED, {"truncate": "END"}, UNSUPPORTED, "truncate", "truncate_prompt_tokens"),
    # score
    (SCORE, NO_SIDES, MISSING, "text_1", "`text_2`"),
    (SCORE, {"text_1": REMOVED}, MISSING, "text_1", "beside `text_2`"),
    (SCORE, {"text_2": REMOVED}, MISSING, "text_2", "beside `text_1`"),
    (SCORE, {"text_1": ""}, VALUE, "text_1", "at least 1"),
    (SCORE, {"text_1": []}, VALUE, "text_1", "at least 1"),
    (SCORE, {"text_1": 5}, TYPE, "text_1", "a string or an array of strings"),
    (SCORE, {"text_2": ["a", ""]}, VALUE, "text_2[1]", "at least 1"),
    (SCORE, {"text_2": ["a", None]}, TYPE, "text_2[1]", "a string"),
    (SCORE, {"text_2": [[1, 2]]}, TYPE, "text_2[0]", "a string"),
    (SCORE, {"text_2": ["a"] * 2049}, VALUE, "text_2", "at most 2048"),
    (SCORE, {"text_1": ["a", "b", "c"]}, VALUE, "text_1", "3 texts and `text_2` 2"),
    (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, VALUE, "text_1", "send one `text_1` for all"),
    (SCORE, {"queries": "a"}, VALUE, "queries", "one pair"),
    (SCORE, {**NO_SIDES, "queries": "a"}, MISSING, "documents", "beside `queries`"),
    (SCORE, {**NO_SIDES, "data_2": "a"}, MISSING, "data_1", "beside `data_2`"),
    (SCORE, {"text_2": ["a", LONG]}, TOO_LONG, "text_2[1]", str(CONTEXT)),
    (SCORE, {"text_1": LONG}, TOO_LONG, "text_1", str(CONTEXT)),
    (SCORE, {"dimensions": 5}, UNSUPPORTED, "dimensions", "/v1/embeddings"),
    (SCORE, {"text_3": "a"}, UNKNOWN, "text_3", "did you mean"),
    # rerank
    (RERANK, {"query": REMOVED}, MISSING, "query", "required"),
    (RERANK, {"documents": REMOVED}, MISSING, "documents", "required"),
    (RERANK, {"query": ""}, VALUE, "query", "at least 1"),
    (RERANK, {"query": ["a"]}, TYPE, "query", "a string"),
    (RERANK, {"query": LONG}, TOO_LONG, "query", str(CONTEXT)),
    (RERANK, {"documents": []}, VALUE, "documents", "at least 1"),
    (RERANK, {"documents": "a"}, TYPE, "documents", "an array"),
    (RERANK, {"documents": ["a", ""]}, VALUE, "documents[1]", "at least 1"),
    (RERANK, {"documents": ["a", 5]}, TYPE, "documents[1]", "a string or an object with `text`"),
    (RERANK, {"documents": [["a"]]}, TYPE, "documents[0]", "an object with `text`"),
    (RERANK, {"documents": [{}]}, MISSING, "documents[0].text", "required"),
    (RERANK, {"documents": [{"text": ""}]}, VALUE, "documents[0].text", "at least 1"),
    (RERANK, {"documents": [{"text": 1}]}, TYPE, "documents[0].text", "a string"),
    (RERANK, {"documents": [{"text": "a", "title": "b"}]}, UNKNOWN, "documents[0].title", "remove"),
    (RERANK, {"documents": ["a", {"text": LONG}]}, TOO_LONG, "documents[1].text", str(CONTEXT)),
    (RERANK, {"documents": ["a"] * 2049}, VALUE, "documents", "at most 2048"),
    (RERANK, {"top_n": -1}, VALUE, "top_n", "at least 0"),
    (RERANK, {"top_n": "2"}, TYPE, "top_n", "an integer"),
    (RERANK, {"return_documents": 1}, TYPE, "return_documents", "true or false"),
    (RERANK, {"max_tokens_per_doc": 0}, VALUE, "max_tokens_per_doc", "at least 1"),
    (RERANK, {"max_tokens_per_doc": 5, "truncate_prompt_tokens": 5}, VALUE,
     "max_tokens_per_doc", "one of them"),
    (RERANK, {"rank_fields": ["text"]}, UNSUPPORTED, "rank_fields", "one text"),
    (RERANK, {"max_chunks_per_doc": 3}, UNSUPPORTED, "max_chunks_per_doc", "chunks"),
    (RERANK, {"top_k": 3}, UNKNOWN, "top_k", "did you mean `top_n`?"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "change", "code", "param", "words"),
    FIELDS,
    ids=[f"{route[4:]}-{param}-{number}" for number, (route, _, _, param, _) in enumerate(FIELDS)],
)
def test_a_wrong_field_is_named_with_its_remedy(
    http: httpx.Client, route: str, change: dict[str, Any], code: str, param: str, words: str
):
    body = {key: value for key, value in (BASE[route] | change).items() if value is not REMOVED}
    answer = http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (code, param), error["message"]
    assert words in error["message"]


def test_too_many_tokens_in_all_name_the_text_where_it_was_too_much(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("server.generation.embeddings.MAX_TOKENS", 5)
    answer = http.post(EMBED, json={"model": "fake", "input": [[1, 2], [3, 4], [5, 6]]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[2]"
    assert "at most 5" in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", list(BASE))
def test_an_unknown_model_and_a_body_that_is_no_json_are_refused_as_everywhere(
    http: httpx.Client, route: str
):
    answer = http.post(route, json=BASE[route] | {"model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = http.post(route, content="{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    answer = http.post(route, content="{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert http.get(route).status_code == 405


@pytest.mark.parametrize(
    "change",
    [
        {"embed_dtype": "float32"},
        {"endianness": "native"},
        {"padding": False},
        {"use_activation": True},
        {"messages": None},
        {"dimensions": HIDDEN},
        {"truncate_prompt_tokens": 100_000},
        {"truncate_prompt_tokens": None, "pooling": None, "user": None},
    ],
)
def test_fields_with_their_default_values_are_accepted(http: httpx.Client, change: dict[str, Any]):
    answer = http.post(EMBED, json=BASE[EMBED] | change)
    assert answer.status_code == 200, answer.text


def test_openais_client_raises_what_the_server_says(fake: FakeServer):
    with pytest.raises(openai.BadRequestError, match="at most 2048") as caught:
        fake.client().embeddings.create(model="fake", input=["a"] * 2049)
    assert caught.value.param == "input"
