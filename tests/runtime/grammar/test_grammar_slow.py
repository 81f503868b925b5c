"""A grammar that can be read in ever more ways ends its own answer, and holds back no other."""

from __future__ import annotations

import pytest

from runtime.grammar.manager import GrammarManager
from runtime.grammar.matchers import MAX_SLOW_SECONDS, TOO_MANY, TOO_SLOW, Matchers, Vocabulary
from runtime.grammar.messages import Advance, Advanced, Compile
from runtime.grammar.worker import SlowSequences, advance
from runtime.messages import RequestOutput
from tests.support.engine.grammar_engine import (
    Texts,
    ask,
    lark_grammar,
    make_engine,
    regex_grammar,
    run,
)
from tests.support.server.fake_engine import VOCAB

AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | s t | t s | "a" | ""\nt: s s t | "a" | t s t'
A = lark_grammar(AMBIGUOUS)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(str(Texts(tmp_path_factory.mktemp("vocabulary")).file), VOCAB)


@pytest.mark.slow
def test_an_ambiguous_grammar_ends_its_answer_and_no_other(grammars: GrammarManager) -> None:
    engine = make_engine(grammars, overlap=True)
    engine.add(ask(1, A, max_tokens=480, stop_ids=()))
    engine.add(ask(2, regex_grammar("[a-z]{300}"), max_tokens=400))
    outputs: list[RequestOutput] = []
    while not engine.idle:
        outputs += engine.step()
    ends = {output.id: output for output in outputs if output.finish}
    assert [output.id for output in outputs if output.finish] == [2, 1]
    assert ends[2].finish == "stop"
    assert (ends[1].finish, ends[1].is_request_error) == ("error", True)
    assert "too complex" in (ends[1].error or "")


def compiled(vocabulary: Vocabulary, *keys: int) -> Matchers:
    matchers = Matchers(vocabulary)
    for key in keys:
        assert matchers.compile(Compile(key, A)).error is None
    return matchers


class Elsewhere(SlowSequences):
    """Keeps what would be computed in another thread."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self.keys: list[int] = []

    def put(self, key: int, tokens: list[int]) -> None:
        self.keys.append(key)


def test_only_the_slow_sequences_of_a_step_are_computed_elsewhere(vocabulary: Vocabulary) -> None:
    matchers = compiled(vocabulary, 1, 2, 3)
    (token,) = vocabulary.tokenizer.tokenize_str("a")
    matchers.sequences[2].slow = True
    elsewhere = Elsewhere(matchers)
    message = Advance([(1, [token]), (2, [token]), (3, [token])])
    assert advance(matchers, message, elsewhere).masks.keys() == {1, 3}
    assert elsewhere.keys == [2]
    matchers.advance([(2, [token])])
    assert not matchers.is_slow(2)  # it was suspected without reason


def test_a_sequence_that_has_used_its_time_ends_and_one_that_waits_too_long(
    vocabulary: Vocabulary,
) -> None:
    matchers = compiled(vocabulary, 1, 2)
    (token,) = vocabulary.tokenizer.tokenize_str("a")
    matchers.sequences[1].slow_seconds = MAX_SLOW_SECONDS + 1
    assert matchers.advance([(1, [token])]) == Advanced({}, [], {1: TOO_SLOW})
    assert Elsewhere(matchers)._advance(0.0, 2, [token]) == Advanced({}, [], {2: TOO_SLOW})


def test_a_grammar_with_too_many_ways_to_go_on_is_refused_in_plain_words(
    grammars: GrammarManager,
) -> None:
    rules = [f'r{index}: "a" "{index}"' for index in range(3000)]
    wide = "start: " + " | ".join(f"r{index}" for index in range(3000)) + "\n" + "\n".join(rules)
    got = run(make_engine(grammars, overlap=True), [ask(1, lark_grammar(wide))])
    end = got[1][-1]
    assert end.is_request_error and (end.error or "").endswith(f": {TOO_MANY}")
