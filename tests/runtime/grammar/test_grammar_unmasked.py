"""A constrained request never goes on without its grammar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.engine.loop import MISSING_MASK
from runtime.grammar.manager import GrammarManager
from runtime.messages import RequestOutput
from tests.support.engine.grammar_engine import Texts, ask, make_engine, regex_grammar
from tests.support.server.fake_engine import VOCAB


@pytest.fixture
def grammars(tmp_path: Path) -> Iterator[GrammarManager]:
    grammars = GrammarManager(Texts(tmp_path).file, VOCAB)
    yield grammars
    grammars.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_one_whose_mask_is_missing_ends_before_the_next_token(
    grammars: GrammarManager, overlap: bool
) -> None:
    engine = make_engine(grammars, overlap=overlap)
    for id in (1, 2):
        engine.add(ask(id, regex_grammar("[a-z]{40}")))
    engine.add(ask(3, max_tokens=30))
    outputs: list[RequestOutput] = []
    while sum(output.id == 1 for output in outputs) < 3:
        outputs += engine.step()
    known = sum(len(output.tokens) for output in outputs if output.id == 1)
    while grammars._advancing:
        grammars._receive(0.1)
    del grammars._masks[1]
    while not engine.idle:
        outputs += engine.step()
    ends = {output.id: output for output in outputs if output.finish}
    assert (ends[1].finish, ends[1].error, ends[1].is_request_error) == (
        "error",
        MISSING_MASK,
        False,
    )
    # One more may have been chosen under the mask before.
    assert sum(len(output.tokens) for output in outputs if output.id == 1) <= known + overlap
    assert (ends[2].finish, ends[3].finish) == ("stop", "length")
    assert engine.requests.pool.num_used == 0 and not grammars.live


def test_one_that_compiled_just_before_the_process_ended_ends_too(grammars: GrammarManager) -> None:
    engine = make_engine(grammars, overlap=False)
    engine.add(ask(1, regex_grammar("[a-z]{40}")))
    while not grammars._compiled:
        grammars._receive(0.1)
    process = grammars._process
    assert process is not None
    process.popen.kill()
    process.popen.wait()
    engine.add(ask(2, regex_grammar("[a-z]{4}")))  # finds that the process has ended
    outputs: list[RequestOutput] = []
    while not engine.idle:
        outputs += engine.step()
    ends = {output.id: output for output in outputs if output.finish}
    assert ends[1].finish == "error" and ends[2].finish == "stop"
    assert not any(output.tokens for output in outputs if output.id == 1)
