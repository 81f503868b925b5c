"""How many values a body may have, counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import RequestError
from server.http.json_body import MAX_BRACKETS, MAX_KEYS, MAX_VALUES, read_json, structure

awkward = st.text(st.sampled_from('"\\[]{},:ab\n\u00e9'), max_size=12)
values = st.recursive(
    st.none() | st.integers() | awkward,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(awkward, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Opening brackets, commas and colons of its JSON."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    brackets = 1 + sum(each[0] for each in inner)
    commas = max(0, len(value) - 1) + sum(each[1] for each in inner)
    keys = len(value) if isinstance(value, dict) else 0
    return brackets, commas, keys + sum(each[2] for each in inner)


@given(values, st.integers(1, 40), st.booleans())
def test_what_is_inside_of_strings_is_not_counted_wherever_chunks_end(
    value: Any, size: int, ascii: bool
):
    raw = json.dumps(value, ensure_ascii=ascii).encode()
    assert structure(raw, size) == counted(value)


@given(st.binary(max_size=60), st.integers(1, 9))
def test_what_is_no_json_is_counted_too(raw: bytes, size: int):
    assert all(0 <= count <= len(raw) for count in structure(raw, size))


def test_a_text_may_have_any_number_of_brackets_and_commas():
    text = 'a[{,:\\"' * (MAX_VALUES + 1)
    assert read_json(json.dumps({"text": text}).encode()) == {"text": text}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [{}] * MAX_BRACKETS}, "objects and arrays"),
        ({"a": [""] * (MAX_VALUES + 2)}, "values"),
        ({"a": dict.fromkeys(range(MAX_KEYS))}, "keys"),
    ],
)
def test_too_many_values_are_refused_before_they_are_parsed(value: Any, words: str):
    with pytest.raises(RequestError, match=words) as refused:
        read_json(json.dumps(value).encode())
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_as_many_token_ids_are_accepted_as_a_request_for_embeddings_may_have():
    ids = [[7] * 512] * 2048
    assert read_json(json.dumps({"input": ids}).encode()) == {"input": ids}
