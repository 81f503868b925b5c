"""Constrained sequences under the real engine: random logits, yet every answer has its form."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.engine.loop import Engine
from runtime.grammar.manager import GrammarManager
from runtime.messages import EngineRequest, RequestOutput
from tests.support.engine.grammar_engine import (
    STOP_ID,
    Texts,
    ask,
    json_grammar,
    lark_grammar,
    make_engine,
    regex_grammar,
    run,
    tokens_of,
)
from tests.support.server.fake_engine import VOCAB


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def grammars(texts: Texts) -> Iterator[GrammarManager]:
    """One grammar process for all engines of this file, as one has no use for two."""
    grammars = GrammarManager(texts.file, VOCAB)
    yield grammars
    grammars.close()


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
    wanted=st.lists(schemas, min_size=1, max_size=4),
    model=st.integers(0, 1000),
    overlap=st.booleans(),
    pages=st.sampled_from([40, 256]),
)
def test_whatever_the_logits_an_answer_fulfils_its_schema(
    texts: Texts,
    grammars: GrammarManager,
    wanted: list[object],
    model: int,
    overlap: bool,
    pages: int,
) -> None:
    engine = make_engine(grammars, overlap=overlap, pages=pages, seed=model)
    requests = [ask(id, json_grammar(schema)) for id, schema in enumerate(wanted)]
    got = run(engine, requests)
    for schema, outputs in zip(wanted, got.values(), strict=True):
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


def test_the_overlapped_loop_says_the_same(grammars: GrammarManager) -> None:
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
    wanted = ask(1, regex_grammar("a+"), stop_ids=(), max_tokens=20)
    got = run(make_engine(grammars, overlap=False), [wanted])
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


def test_a_grammar_that_cannot_be_used_ends_its_request_only(
    texts: Texts, grammars: GrammarManager
) -> None:
    engine = make_engine(grammars, overlap=True)
    wanted = [ask(1, lark_grammar("start: nothing")), ask(2, regex_grammar("abc")), ask(3, "[")]
    got = run(engine, wanted)
    for id in (1, 3):
        assert (got[id][-1].finish, got[id][-1].is_request_error) == ("error", True)
    assert "nothing" in (got[1][-1].error or "")
    assert texts.of(got[2]) == "abc"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "ab" A\nA: /x{1,3}/ & /y/',  # nothing is both
        'start: "ab" a\na: "x" a',  # no end
    ],
)
def test_a_grammar_that_leads_nowhere_ends_its_request_only(
    grammars: GrammarManager, grammar: str
) -> None:
    engine = make_engine(grammars, overlap=True)
    got = run(engine, [ask(1, lark_grammar(grammar)), ask(2, max_tokens=9)])
    end = got[1][-1]
    assert (end.finish, end.is_request_error) == ("error", True)
    assert "leads nowhere" in (end.error or "")
    assert got[2][-1].finish == "length"


def test_a_fault_of_ours_while_a_grammar_is_compiled_ends_its_request_only(
    grammars: GrammarManager,
) -> None:
    schema = json_grammar({"type": "boolean"})
    unknown = VOCAB + 4096  # no token: the engine refuses such a request, but later
    grammars.submit(ask(1, schema, stop_ids=(unknown,), min_tokens=1))
    grammars.submit(ask(2, schema))
    done: dict[int, tuple[str | None, bool]] = {}
    until = time.monotonic() + 20
    while len(done) < 2 and time.monotonic() < until:
        done |= {
            one.id: (error, is_request_error)
            for one, error, is_request_error in grammars.take_compiled(0.1)
        }
    grammars.release(1)
    grammars.release(2)
    assert done[2][0] is None
    error, is_request_error = done[1]
    assert error is not None and error.startswith("internal error: ") and not is_request_error


def test_an_engine_without_grammars_refuses_them() -> None:
    got = run(make_engine(None, overlap=True), [ask(1, regex_grammar("a"))])
    assert (got[1][-1].finish, got[1][-1].is_request_error) == ("error", True)


def step_until(engine: Engine, id: int, count: int) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(10_000):
        outputs += engine.step()
        if len([output for output in outputs if output.id == id]) >= count:
            return outputs
    raise AssertionError("no progress")


@pytest.mark.parametrize("early", [True, False], ids=["while it compiles", "while it runs"])
def test_an_aborted_request_is_forgotten(grammars: GrammarManager, early: bool) -> None:
    engine = make_engine(grammars, overlap=True)
    # Ids of its own, as in a server: what the process still says of this one is for nobody else.
    id = 1001 if early else 1002
    engine.add(ask(id, regex_grammar("[a-z]{50}")))
    if not early:
        step_until(engine, id, 3)
    engine.abort(id)
    outputs = engine.step()
    while engine.has_work:
        outputs += engine.step()
    assert [output.finish for output in outputs if output.finish] == ["abort"]
    assert not grammars.has_live and not grammars.compiling
    assert engine.requests.pool.num_used == 0


@pytest.mark.parametrize(("id", "regex"), [(1003, "[a-z]{50}"), (1004, "[")])
def test_a_request_aborted_just_after_its_grammar_was_compiled_never_runs(
    grammars: GrammarManager, id: int, regex: str
) -> None:
    engine = make_engine(grammars, overlap=True)
    engine.add(ask(1, regex_grammar("[a-z]{50}")))
    step_until(engine, 1, 2)
    engine.add(ask(id, regex_grammar(regex)))
    while not grammars._compiled:
        grammars._receive(0.1)  # as a step does that waits for masks
    engine.abort(id)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
        assert id not in [one.request_id for one in engine.requests.running()]
    told = [(output.finish, output.tokens) for output in outputs if output.id == id]
    assert told == [("abort", [])]
    assert engine.requests.pool.num_used == 0 and not grammars.has_live and not grammars.compiling


def test_a_dead_grammar_process_ends_its_requests_and_the_next_one_gets_another(
    texts: Texts, grammars: GrammarManager
) -> None:
    engine = make_engine(grammars, overlap=True)
    engine.add(ask(1, regex_grammar("[a-z]{100}")))
    engine.add(ask(2, max_tokens=40))
    outputs = step_until(engine, 1, 2)
    process = grammars._process
    assert process is not None
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    while engine.has_work:
        outputs += engine.step()
    ends = {output.id: output for output in outputs if output.finish}
    assert "SIGKILL" in (ends[1].error or "") and not ends[1].is_request_error
    assert ends[2].finish == "length"
    assert texts.of(run(engine, [ask(3, regex_grammar("abc"))])[3]) == "abc"


def test_a_grammar_process_that_died_while_nobody_needed_it_is_nobodys_fault(
    texts: Texts, grammars: GrammarManager
) -> None:
    engine = make_engine(grammars, overlap=True)
    run(engine, [ask(1, regex_grammar("abc"))])
    process = grammars._process
    assert process is not None
    process.popen.kill()
    process.popen.wait()
    assert texts.of(run(engine, [ask(2, regex_grammar("abd"))])[2]) == "abd"


def test_a_grammar_process_that_dies_while_it_compiles_is_tried_once_more(
    texts: Texts, grammars: GrammarManager
) -> None:
    engine = make_engine(grammars, overlap=True)
    run(engine, [ask(1, regex_grammar("abc"))])
    for times, finish in ((1, "stop"), (2, "error")):
        process = grammars._process
        assert process is not None
        os.kill(process.popen.pid, signal.SIGSTOP)  # it shall not answer first
        engine.add(ask(times, regex_grammar("abe")))
        outputs: list[RequestOutput] = []
        for _ in range(times):
            process = grammars._process
            assert process is not None
            process.popen.kill()  # the second one has hardly begun to start
            process.popen.wait()
            while grammars.compiling and grammars._process is process:
                outputs += engine.step()
        while engine.has_work:
            outputs += engine.step()
        assert [output.finish for output in outputs if output.finish] == [finish]
        run(engine, [ask(9, regex_grammar("abc"))])
    assert texts.of(run(engine, [ask(3, regex_grammar("abf"))])[3]) == "abf"


def test_a_model_without_a_tokenizer_file_has_no_grammars(tmp_path: Path) -> None:
    engine = make_engine(GrammarManager(tmp_path / "tokenizer.json", VOCAB), overlap=True)
    got = run(engine, [ask(1, regex_grammar("a"))])
    assert "tokenizer.json" in (got[1][-1].error or "")
