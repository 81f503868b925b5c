"""Grammars that do not compile and grammar processes that die end their own requests only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from runtime.grammar.manager import GrammarManager
from runtime.messages import RequestOutput
from tests.support.engine.grammar_engine import (
    Texts,
    ask,
    json_grammar,
    lark_grammar,
    make_engine,
    regex_grammar,
    run,
    step_until,
)
from tests.support.server.fake_engine import VOCAB


def test_a_grammar_that_cannot_be_used_ends_its_request_only(
    texts: Texts, grammars: GrammarManager
) -> None:
    engine = make_engine(grammars, overlap=True)
    requests = [ask(1, lark_grammar("start: nothing")), ask(2, regex_grammar("abc")), ask(3, "[")]
    got = run(engine, requests)
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


def test_an_internal_error_while_a_grammar_is_compiled_ends_its_request_only(
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


@pytest.mark.parametrize("early", [True, False], ids=["while it compiles", "while it runs"])
def test_an_aborted_request_is_forgotten(grammars: GrammarManager, early: bool) -> None:
    engine = make_engine(grammars, overlap=True)
    # Ids of its own, as in a server: late replies of the process reach no other request.
    id = 1001 if early else 1002
    engine.add(ask(id, regex_grammar("[a-z]{50}")))
    if not early:
        step_until(engine, id, 3)
    engine.abort(id)
    outputs = engine.step()
    while not engine.idle:
        outputs += engine.step()
    assert [output.finish for output in outputs if output.finish] == ["abort"]
    assert not grammars.live and not grammars.compiling
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
    while not engine.idle:
        outputs += engine.step()
        assert id not in [one.request_id for one in engine.requests.running()]
    received = [(output.finish, output.tokens) for output in outputs if output.id == id]
    assert received == [("abort", [])]
    assert engine.requests.pool.num_used == 0 and not grammars.live and not grammars.compiling


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
    while not engine.idle:
        outputs += engine.step()
    ends = {output.id: output for output in outputs if output.finish}
    assert "SIGKILL" in (ends[1].error or "") and not ends[1].is_request_error
    assert ends[2].finish == "length"
    assert texts.of(run(engine, [ask(3, regex_grammar("abc"))])[3]) == "abc"


def test_a_grammar_process_that_died_while_idle_fails_no_request(
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
        while not engine.idle:
            outputs += engine.step()
        assert [output.finish for output in outputs if output.finish] == [finish]
        run(engine, [ask(9, regex_grammar("abc"))])
    assert texts.of(run(engine, [ask(3, regex_grammar("abf"))])[3]) == "abf"


def test_a_model_without_a_tokenizer_file_has_no_grammars(tmp_path: Path) -> None:
    engine = make_engine(GrammarManager(tmp_path / "tokenizer.json", VOCAB), overlap=True)
    got = run(engine, [ask(1, regex_grammar("a"))])
    assert "tokenizer.json" in (got[1][-1].error or "")
