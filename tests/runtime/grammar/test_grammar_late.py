"""A grammar process that is late or hangs holds back the rows that wait for it, and no others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.engine.loop import Engine
from runtime.grammar.manager import REPLY_TIMEOUT_SECONDS, SILENT, STEP_WAIT_SECONDS, GrammarManager
from runtime.messages import EngineRequest, RequestOutput
from runtime.scheduler.admission import HELD_SECONDS
from tests.support.engine.bench import request, resolved
from tests.support.engine.fake_grammar_process import FakeGrammars
from tests.support.engine.fake_model import VOCAB_SIZE, FakeExecutor, plain_decoding
from tests.support.engine.grammar_engine import (
    Texts,
    ask,
    make_engine,
    regex_grammar,
    run,
    tokens_of,
)
from tests.support.server.fake_engine import VOCAB

HUNG = 1000.0  # seconds to an answer: there will be none


@pytest.fixture
def grammars(tmp_path: Path) -> Iterator[GrammarManager]:
    grammars = GrammarManager(Texts(tmp_path).file, VOCAB)
    yield grammars
    grammars.close()


def step_until(engine: Engine, id: int, count: int) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while sum(output.id == id for output in outputs) < count:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("overlap", [False, True])
def test_while_the_grammar_process_hangs_only_its_own_rows_wait(
    grammars: GrammarManager, overlap: bool
) -> None:
    wanted = [ask(id, regex_grammar("[a-z]{60}"), repetition_penalty=1.2) for id in (1, 2)]
    undisturbed = run(make_engine(grammars, overlap=overlap), wanted)
    engine = make_engine(grammars, overlap=overlap)
    for one in wanted:
        engine.add(one)
    outputs = step_until(engine, 1, 3)
    process = grammars._process
    assert process is not None
    os.kill(process.popen.pid, signal.SIGSTOP)
    engine.add(ask(3, max_tokens=100, stop_ids=()))
    began = time.monotonic()
    outputs += step_until(engine, 3, 100)
    assert time.monotonic() - began < REPLY_TIMEOUT_SECONDS / 2
    assert grammars.late == {1, 2}
    os.kill(process.popen.pid, signal.SIGCONT)
    while not engine.idle:
        outputs += engine.step()
    assert engine.requests.pool.num_used == 0 and not grammars.live
    for one in wanted:
        got = [output for output in outputs if output.id == one.id]
        assert tokens_of(got) == tokens_of(undisturbed[one.id])


def test_a_grammar_process_that_hangs_too_long_ends_its_own_requests_alone(
    grammars: GrammarManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(grammars, overlap=True)
    engine.add(ask(1, regex_grammar("[a-z]{100}")))
    outputs = step_until(engine, 1, 2)
    process = grammars._process
    assert process is not None
    os.kill(process.popen.pid, signal.SIGSTOP)
    engine.add(ask(2, max_tokens=40, stop_ids=()))
    outputs += step_until(engine, 2, 10)
    engine.add(ask(3, regex_grammar("abc")))
    monkeypatch.setattr("runtime.grammar.manager.REPLY_TIMEOUT_SECONDS", 0.0)
    outputs += step_until(engine, 1, 1)
    monkeypatch.undo()
    while not engine.idle:
        outputs += engine.step()
    ends = {output.id: output for output in outputs if output.finish}
    assert (ends[1].finish, ends[1].error, ends[1].is_request_error) == ("error", SILENT, False)
    # The next process compiles what the one before had not.
    assert (ends[2].finish, ends[3].finish) == ("length", "stop")


class Late:
    """An engine on the fake model whose grammar process takes as long as it is told."""

    def __init__(self, delays: list[float], *, slots: int = 4, pages: int = 64) -> None:
        self.config = resolved(max_num_seqs=slots, num_pages=pages)
        self.grammars = FakeGrammars(delays)
        self.clock = self.grammars.clock
        self.executor = FakeExecutor(self.config, overlap=True)
        self.engine = Engine(
            self.config, VOCAB_SIZE, self.executor, grammars=self.grammars, clock=self.clock
        )
        self.outputs: list[RequestOutput] = []

    def step(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        self.outputs += self.engine.step()
        self.engine.requests.check_integrity()

    def end(self, id: int) -> RequestOutput | None:
        ends = [output for output in self.outputs if output.id == id and output.finish]
        return ends[0] if ends else None

    def is_right(self, one: EngineRequest) -> bool:
        tokens = [
            token for output in self.outputs if output.id == one.id for token in output.tokens
        ]
        return tokens == plain_decoding(one.tokens, one.params, max_model_len=64)[0]


def test_a_hung_process_costs_the_others_one_short_wait() -> None:
    late = Late([0.0, HUNG])
    late.engine.add(request(1, [1, 2], max_tokens=9, grammar="a form"))
    late.engine.add(plain := request(2, [3, 4], max_tokens=30))
    began = late.clock.now
    while late.end(2) is None:
        late.step()
    assert late.clock.now - began < STEP_WAIT_SECONDS + 0.002
    assert late.end(1) is None and late.is_right(plain)


def test_masks_that_are_always_late_cost_each_step_a_millisecond() -> None:
    late = Late([0.0] + [0.3] * 99)
    late.engine.add(bound := request(1, [1, 2], max_tokens=6, grammar="a form"))
    late.engine.add(plain := request(2, [3, 4], max_tokens=60))
    waits: list[float] = []
    while late.end(1) is None:
        before = late.clock.now
        late.step()
        waits.append(late.clock.now - before)
        late.clock.now += 0.05
    assert sum(waits) <= STEP_WAIT_SECONDS + 0.001 * len(waits) + 1e-6
    assert late.is_right(bound)
    while late.end(2) is None:
        late.step()
    assert late.is_right(plain)


def test_a_row_that_was_left_out_is_waited_for_again_once_masks_come_in_time() -> None:
    late = Late([0.0, 0.3] + [0.004] * 99)
    late.engine.add(bound := request(1, [1, 2], max_tokens=30, grammar="a form"))
    while late.end(1) is None:
        late.step(0.01)
    assert late.is_right(bound)
    # Its tokens come in every step: one was left out, two more until it was known to be over.
    assert len(late.executor.batches) <= 30 + 6


def test_who_waits_for_a_slot_gets_that_of_a_request_that_is_held_for_long() -> None:
    late = Late([0.0, HUNG], slots=1)
    late.engine.add(request(1, [1, 2], max_tokens=9, grammar="a form"))
    while not late.grammars.late:
        late.step()
    late.engine.add(plain := request(2, [3, 4], max_tokens=5, priority=9))
    for _ in range(5):
        late.step()
    assert not any(output.id == 2 for output in late.outputs)
    late.step(HELD_SECONDS)
    while late.end(2) is None:
        late.step(0.01)
    assert late.is_right(plain) and late.end(1) is None
    late.step(1.5 * REPLY_TIMEOUT_SECONDS)
    assert (end := late.end(1)) is not None and end.error == SILENT
    assert late.engine.idle and late.engine.stats().pages_used == 0


def test_a_held_request_that_gave_up_its_slot_goes_on_when_its_mask_comes() -> None:
    late = Late([0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0], slots=1)
    late.engine.add(bound := request(1, [1, 2], max_tokens=8, grammar="a form"))
    while not late.grammars.late:
        late.step()
    late.engine.add(plain := request(2, [3, 4], max_tokens=5))
    late.step(HELD_SECONDS)
    while late.end(1) is None:
        late.step(0.2)
    assert late.is_right(plain) and late.is_right(bound)
    assert late.engine.requests.num_preemptions == 1


@pytest.mark.parametrize("slots", [1, 4], ids=["without a slot", "in its slot"])
def test_a_held_request_can_be_aborted(slots: int) -> None:
    late = Late([0.0, HUNG], slots=slots)
    late.engine.add(request(1, [1, 2], max_tokens=9, grammar="a form"))
    while not late.grammars.late:
        late.step()
    late.engine.add(request(2, [3, 4], max_tokens=2))
    while late.end(2) is None:
        late.step(HELD_SECONDS)
    late.engine.abort(1)
    late.step()
    assert (end := late.end(1)) is not None and end.finish == "abort"
    late.step(1.5 * REPLY_TIMEOUT_SECONDS)
    assert late.engine.idle and late.engine.stats().pages_used == 0


def test_a_process_that_compiles_for_ever_is_given_up_after_a_second_attempt() -> None:
    late = Late([HUNG])
    late.engine.add(request(1, [1, 2], max_tokens=9, grammar="a form"))
    for _ in range(200):
        late.step(1.0)
    assert (end := late.end(1)) is not None and end.error == SILENT
