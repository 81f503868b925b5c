"""Constrained sequences under the real engine: random logits, yet every answer has its form."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.grammar.manager import GrammarManager
from runtime.messages import EngineRequest
from tests.support.engine.grammar_engine import (
    STOP_ID,
    Texts,
    ask,
    json_grammar,
    make_engine,
    regex_grammar,
    run,
    tokens_of,
)

# Values that end soon: random logits would fill an open string until max_tokens.
scalars = st.one_of(
    st.builds(
        lambda least, span: {"type": "integer", "minimum": least, "maximum": least + span},
        st.integers(-999, 999),
        st.integers(0, 2000),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[a-f]{2,4}$"}),
    st.just({"type": "boolean"}),
    st.just({"type": ["null", "boolean"]}),
    st.lists(
        st.one_of(st.text("ab\u00e9\"\\ \n", max_size=4), st.integers(-9, 9), st.none()),
        min_size=1, max_size=4, unique_by=repr,
    ).map(lambda values: {"enum": values}),
)  # fmt: skip


def _object(properties: dict[str, object], optional: int) -> dict[str, object]:
    required = sorted(properties)[optional:]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _nested(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    arrays = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most},
        inner,
        st.integers(0, 3),
    )
    objects = st.builds(
        _object, st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), st.integers(0, 2)
    )
    choices = st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"anyOf": schemas})
    return arrays | objects | choices


schemas = st.recursive(scalars, _nested, max_leaves=5)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requested=st.lists(schemas, min_size=1, max_size=4),
    model=st.integers(0, 1000),
    overlap=st.booleans(),
    pages=st.sampled_from([40, 256]),
)
def test_whatever_the_logits_an_answer_fulfils_its_schema(
    texts: Texts,
    grammars: GrammarManager,
    requested: list[object],
    model: int,
    overlap: bool,
    pages: int,
) -> None:
    engine = make_engine(grammars, overlap=overlap, pages=pages, seed=model)
    requests = [ask(id, json_grammar(schema)) for id, schema in enumerate(requested)]
    got = run(engine, requests)
    for schema, outputs in zip(requested, got.values(), strict=True):
        assert outputs[-1].finish == "stop", outputs[-1]
        jsonschema.validate(json.loads(texts.of(outputs)), schema)  # type: ignore[arg-type]


REGEXES = ["[ab]{2,5}c", "(yes|no|maybe)!?", r"\d{4}-\d{2}", "x*y", "(a|b)*abb"]


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_match_their_regular_expressions_and_choices(
    texts: Texts, grammars: GrammarManager, overlap: bool
) -> None:
    engine = make_engine(grammars, overlap=overlap)
    forms = [*REGEXES, "red|green|dark blue"]
    got = run(engine, [ask(id, regex_grammar(form)) for id, form in enumerate(forms)])
    for form, outputs in zip(forms, got.values(), strict=True):
        if outputs[-1].finish == "stop":
            assert re.fullmatch(form, texts.of(outputs)), form
        else:
            assert outputs[-1].finish == "length"
    assert texts.of(got[5]) in ("red", "green", "dark blue")


FIELDS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -50, "maximum": 5000},
        "b": {"enum": ["x", "yy", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


def mixed(first: int = 0) -> list[EngineRequest]:
    """Requests with and without grammars, and with all that else bends the logits."""
    form = json_grammar(FIELDS)
    return [
        ask(first, form),
        ask(first + 1, max_tokens=40),
        ask(first + 2, form, temperature=0.0),
        ask(first + 3, form, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
        ask(first + 4, max_tokens=30, logprobs=2),
        ask(first + 5, form, logit_bias={30: 50.0, 3: -100.0}, top_p=0.8, top_k=5, min_p=0.01),
        ask(first + 6, regex_grammar("[a-z]{3,30}"), min_tokens=3, logprobs=3),
        ask(first + 7, form, banned=((40,), (41, 42))),
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_with_and_without_grammars_do_not_influence_each_other(
    grammars: GrammarManager, overlap: bool
) -> None:
    together = run(make_engine(grammars, overlap=overlap), mixed())
    for request in mixed():
        alone = run(make_engine(grammars, overlap=overlap), [request])
        assert tokens_of(together[request.id]) == tokens_of(alone[request.id])


def test_the_overlapped_loop_gives_the_same_outputs(grammars: GrammarManager) -> None:
    plain = run(make_engine(grammars, overlap=False), mixed())
    overlapped = run(make_engine(grammars, overlap=True), mixed())
    assert [tokens_of(o) for o in plain.values()] == [tokens_of(o) for o in overlapped.values()]


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_answers_go_on_where_they_were(
    texts: Texts, grammars: GrammarManager, overlap: bool
) -> None:
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 25}
    form = json_grammar(flags)
    requests = [ask(id, form) for id in range(6)]
    roomy = run(make_engine(grammars, overlap=overlap), requests)
    engine = make_engine(grammars, overlap=overlap, pages=12)
    tight = run(engine, requests)
    assert engine.requests.num_preemptions > 0
    for id, outputs in tight.items():
        assert tokens_of(outputs) == tokens_of(roomy[id])
        json.loads(texts.of(outputs))


def test_a_grammar_that_takes_no_more_ends_the_answer_without_an_end_token(
    texts: Texts, grammars: GrammarManager
) -> None:
    got = run(make_engine(grammars, overlap=True), [ask(1, regex_grammar("abc"), stop_ids=())])
    end = got[1][-1]
    assert texts.of(got[1]) == "abc"
    assert (end.finish, end.stop_id) == ("stop", None)


def test_without_end_tokens_an_open_grammar_goes_on_to_the_limit(
    texts: Texts, grammars: GrammarManager
) -> None:
    requested = ask(1, regex_grammar("a+"), stop_ids=(), max_tokens=20)
    got = run(make_engine(grammars, overlap=False), [requested])
    assert got[1][-1].finish == "length"
    assert re.fullmatch("a+", texts.of(got[1]))


@pytest.mark.parametrize("seed", range(5))
def test_no_end_before_min_tokens_unless_the_grammar_has_nothing_else(
    texts: Texts, grammars: GrammarManager, seed: int
) -> None:
    engine = make_engine(grammars, overlap=True, seed=seed)
    got = run(
        engine,
        [
            ask(1, regex_grammar("[ab]+"), min_tokens=9, logit_bias={STOP_ID: 100.0}),
            ask(2, regex_grammar("[ab]{1,2}"), min_tokens=9),
        ],
    )
    assert len(tokens_of(got[1])) == 10  # the end token is the tenth
    assert got[2][-1].finish == "stop"
    assert re.fullmatch("[ab]{1,2}", texts.of(got[2]))


def test_max_tokens_cuts_an_answer_short(grammars: GrammarManager) -> None:
    got = run(make_engine(grammars, overlap=True), [ask(1, json_grammar(FIELDS), max_tokens=4)])
    assert got[1][-1].finish == "length"
    assert len(tokens_of(got[1])) == 4


def test_logprobs_are_among_the_tokens_that_the_grammar_allows(grammars: GrammarManager) -> None:
    got = run(make_engine(grammars, overlap=False), [ask(1, regex_grammar("ab|ac"), logprobs=5)])
    scores = [score for output in got[1] for score in output.logprobs or []]
    first = scores[0]
    assert first.logprob == pytest.approx(0.0, abs=1e-6)
    assert len(first.top) <= 5
    assert all(logprob > -float("inf") for score in scores for _, logprob in score.top)


def test_equal_seeds_give_equal_answers(grammars: GrammarManager) -> None:
    form = json_grammar(FIELDS)
    requests = [ask(1, form, seed=7), ask(2, form, seed=7), ask(3, form, seed=8)]
    for request in requests:
        request.tokens[:] = [1, 2, 3]
    got = run(make_engine(grammars, overlap=True), requests)
    assert tokens_of(got[1]) == tokens_of(got[2]) != tokens_of(got[3])
