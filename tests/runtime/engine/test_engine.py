"""What a caller of the engine sees: answers, ends, errors."""

from __future__ import annotations

import pytest

from runtime.engine.loop import IDLE_BEFORE_PREPARE_SECONDS, Engine
from runtime.messages import TokenLogprob
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.stats import GraphCounts
from tests.support.engine.bench import Bench, request
from tests.support.engine.fake_model import VOCAB_SIZE, FakePending


def prompt(length: int, *, first: int = 1) -> list[int]:
    return [(first + position) % 90 for position in range(length)]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_answer_ends_at_max_tokens(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    one = request(1, prompt(5), max_tokens=6)
    bench.run(one)
    assert bench.tokens(1) == bench.plain(one)
    assert bench.end(1).finish == "length" and len(bench.tokens(1)) == 6


@pytest.mark.parametrize("overlap", [True, False])
def test_the_answer_ends_with_the_first_stop_id(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    free = bench.plain(request(0, prompt(5), max_tokens=6))
    bench.run(request(1, prompt(5), max_tokens=6, stop_ids=(free[3],)))
    assert bench.tokens(1) == free[:4]
    assert (bench.end(1).finish, bench.end(1).stop_id) == ("stop", free[3])


def test_a_stop_id_does_not_count_before_min_tokens() -> None:
    bench = Bench()
    free = bench.plain(request(0, prompt(5), max_tokens=6))
    one = request(1, prompt(5), max_tokens=9, min_tokens=5, stop_ids=tuple(free))
    bench.run(one)
    assert bench.tokens(1) == bench.plain(one) and len(bench.tokens(1)) > 5


def test_the_answer_ends_where_the_context_does() -> None:
    bench = Bench(max_model_len=12)
    bench.run(request(1, prompt(5), max_tokens=100))
    assert len(bench.tokens(1)) == 7 and bench.end(1).finish == "length"


def test_an_overlapped_step_says_what_the_step_before_made() -> None:
    bench = Bench(overlap=True)
    bench.add(request(1, prompt(5)))
    assert bench.step() == []
    assert len(bench.step()) == 1


def test_a_synchronous_executor_answers_in_the_same_step() -> None:
    bench = Bench(overlap=False)
    bench.add(request(1, prompt(5)))
    assert len(bench.step()) == 1


def test_the_first_output_says_when_the_request_was_started() -> None:
    bench = Bench()
    bench.run(request(1, prompt(5)))
    first, *others = bench.of(1)
    assert first.started > 0 and all(output.started == 0 for output in others)


def test_logprobs_come_with_their_tokens_to_those_who_asked() -> None:
    bench = Bench()
    bench.run(request(1, prompt(5), logprobs=0), request(2, prompt(5)))
    for output in bench.of(1):
        assert output.logprobs == [TokenLogprob(-output.tokens[0] / VOCAB_SIZE, 1, [])]
    assert all(output.logprobs is None for output in bench.of(2))


# A caller leaves.


def test_an_abort_while_waiting_is_answered_and_takes_nothing_from_others() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(request(1, prompt(5)), request(2, prompt(5)), request(3, prompt(5)))
    bench.step()
    bench.engine.abort(2)
    bench.run()
    assert bench.end(2).finish == "abort" and bench.tokens(2) == []
    assert bench.tokens(3) == bench.tokens(1)


def test_an_abort_during_prefill_frees_its_pages_within_one_step() -> None:
    bench = Bench(max_batched_tokens=4)
    bench.add(request(1, prompt(30)))
    bench.step(2)
    assert bench.engine.stats().pages_used > 0
    bench.engine.abort(1)
    assert [output.finish for output in bench.step()] == ["abort"]
    assert bench.engine.stats().pages_used == 0
    bench.run()
    assert bench.end(1).started > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_while_decoding_frees_its_pages_within_one_step(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    bench.add(request(1, prompt(6), max_tokens=30))
    bench.step(5)
    bench.engine.abort(1)
    assert [(output.tokens, output.finish) for output in bench.step()] == [([], "abort")]
    assert bench.engine.stats().pages_used == 0
    bench.run()
    assert bench.end(1).finish == "abort"


def test_an_abort_of_a_preempted_sequence_is_answered_once() -> None:
    bench = Bench(page_size=4, num_pages=6, max_model_len=24)
    bench.add(*(request(i, prompt(6, first=i * 20), max_tokens=18) for i in (1, 2)))
    while not bench.engine.stats().preemptions:
        bench.step()
    bench.engine.abort(2)
    bench.run()
    assert bench.end(2).finish == "abort" and bench.end(1).finish == "length"


def test_an_abort_of_what_has_ended_or_never_was_says_nothing() -> None:
    bench = Bench()
    bench.run(request(1, prompt(5)))
    bench.engine.abort(1)
    bench.engine.abort(77)
    assert bench.step() == [] and bench.engine.idle


def test_a_request_aborted_before_its_first_step_gets_its_end() -> None:
    bench = Bench()
    bench.add(request(1, prompt(5)))
    bench.engine.abort(1)
    bench.run()
    assert bench.end(1).finish == "abort" and bench.batches == []


# What cannot work ends alone.


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([1, VOCAB_SIZE], {}, f"contains {VOCAB_SIZE}, not a token id of this model"),
        ([1, -1], {}, "contains -1"),
        ([1, 2**40], {}, f"ids run from 0 to {VOCAB_SIZE - 1}"),
        ([1], {"max_tokens": 0}, "at least 1"),
        ([1], {"stop_ids": (VOCAB_SIZE,)}, "`stop_ids` contains"),
        ([1], {"logit_bias": {-3: 1.0}}, "`logit_bias` contains -3"),
        (prompt(64), {}, "maximum context length is 64"),
        (prompt(30), {"max_tokens": 20}, "the KV cache holds 40 tokens"),
    ],
)
def test_what_can_never_run_is_refused_and_others_go_on(
    tokens: list[int], params: dict[str, object], message: str
) -> None:
    bench = Bench(num_pages=10)
    good = request(1, prompt(5))
    bench.run(request(2, tokens, **params), good)
    assert bench.end(2).finish == "error" and message in (bench.end(2).error or "")
    assert bench.tokens(1) == bench.plain(good)


def test_a_row_that_fails_ends_its_request_only() -> None:
    bench = Bench()
    requests = [request(i, prompt(5, first=i * 9), max_tokens=8) for i in range(3)]
    bench.add(*requests)
    bench.step(2)
    bench.executor.fail_slots[bench.batches[0].slots[1]] = "logits are not finite"
    bench.run()
    assert (bench.end(1).finish, bench.end(1).error) == ("error", "logits are not finite")
    for one in (requests[0], requests[2]):
        assert bench.tokens(one.id) == bench.plain(one)


def test_pages_of_a_row_that_failed_are_not_shared() -> None:
    bench = Bench(page_size=4)
    bench.add(request(1, prompt(12), max_tokens=8))
    bench.step(2)
    bench.executor.fail_slots[bench.batches[0].slots[0]] = "logits are not finite"
    bench.run()
    bench.run(request(2, prompt(12)))
    assert bench.of(2)[0].cached == 0


def test_a_part_of_a_prompt_that_failed_ends_its_request_before_others_find_its_pages() -> None:
    bench = Bench(page_size=4, max_batched_tokens=8)
    bench.add(request(1, prompt(40)))
    bench.step()
    bench.executor.fail_slots[bench.batches[0].slots[0]] = "keys are not finite"
    late = request(2, prompt(40))
    bench.add(late)
    bench.run()
    assert (bench.end(1).finish, bench.tokens(1)) == ("error", [])
    assert bench.of(2)[0].cached == 0 and bench.tokens(2) == bench.plain(late)


class WrongToken:
    """Samples an id that is no token in the first row of the third step."""

    def __init__(self, bench: Bench) -> None:
        self.overlap = bench.executor.overlap
        self._true = bench.executor
        self._step = 0

    def forward(self, batch: Batch) -> None:
        self._true.forward(batch)

    def sample(self, batch: Batch, masks: Masks | None = None) -> WrongToken:
        self._step += 1
        self._pending = self._true.sample(batch)
        return self

    def wait(self) -> ModelRunnerOutput:
        sampled = self._pending.wait()
        if self._step == 3:
            sampled.tokens[0] = 2**31 - 1
        return sampled


def test_a_sampled_id_that_is_no_token_ends_its_request_only() -> None:
    bench = Bench(overlap=False)
    bench.engine = type(bench.engine)(bench.config, VOCAB_SIZE, WrongToken(bench))
    good = request(2, prompt(5, first=40), max_tokens=8)
    bench.run(request(1, prompt(5), max_tokens=8), good)
    assert bench.end(1).finish == "error" and "not a token id" in (bench.end(1).error or "")
    assert bench.tokens(2) == bench.plain(good)


class BrokenExecutor:
    overlap = False

    def forward(self, batch: Batch) -> None:
        raise RuntimeError("the device is gone")

    def sample(self, batch: Batch, masks: Masks | None = None) -> WrongToken:
        raise AssertionError


def test_what_the_executor_raises_ends_the_engine() -> None:
    bench = Bench()
    bench.engine = type(bench.engine)(bench.config, VOCAB_SIZE, BrokenExecutor())
    bench.add(request(1, prompt(5)))
    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.step()


def test_an_id_in_use_is_our_own_mistake() -> None:
    bench = Bench()
    bench.add(request(1, prompt(5)))
    with pytest.raises(ValueError, match="request id 1 is in use"):
        bench.add(request(1, prompt(5)))


def test_stats_count_what_was_done() -> None:
    bench = Bench()
    bench.run(request(1, prompt(5), max_tokens=3), request(2, prompt(6, first=50), max_tokens=3))
    stats = bench.engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (11, 6, 3)
    assert (stats.running, stats.waiting, stats.pages_used, stats.pages_total) == (0, 0, 0, 64)
    assert stats.step_tokens == 2 and stats.step_seconds > 0
    assert sum(stats.step_tokens_counts) == sum(stats.step_seconds_counts) == 3
    assert stats.step_tokens_counts[1] == 2 and stats.step_tokens_counts[4] == 1  # 2, 2 and 11
    assert stats.step_tokens_sum == 15


class Capturing:
    """An executor that captures a graph whenever it is asked to prepare, and if told, in a step."""

    def __init__(self, bench: Bench) -> None:
        self.overlap = bench.executor.overlap
        self.graph_counts = GraphCounts()
        self._true = bench.executor
        self.capture_in_steps = False

    def prepare(self) -> bool:
        self.graph_counts.captures += 1
        return True

    def forward(self, batch: Batch) -> None:
        self.graph_counts.captures += self.capture_in_steps
        self._true.forward(batch)

    def sample(self, batch: Batch, masks: Masks | None = None) -> FakePending:
        return self._true.sample(batch, masks)


def test_graphs_are_captured_while_there_is_no_request_and_never_while_rows_decode() -> None:
    bench, now = Bench(), [100.0]
    executor = Capturing(bench)
    counts = executor.graph_counts
    engine = bench.engine = Engine(
        bench.config, VOCAB_SIZE, executor, graphs=counts, clock=lambda: now[0]
    )
    assert engine.prepare() and counts.captures == 1, "before the first request"
    engine.add(request(1, prompt(5), max_tokens=8))
    while not engine.idle:
        now[0] += 2 * IDLE_BEFORE_PREPARE_SECONDS
        assert not engine.prepare()
        engine.step()
    assert not engine.prepare() and counts.captures == 1, "the next request may come at once"
    now[0] += 2 * IDLE_BEFORE_PREPARE_SECONDS
    assert engine.prepare() and counts.captures == 2
    assert engine.stats().graphs_captured_while_decoding == 0

    executor.capture_in_steps = True
    engine.add(request(2, prompt(5), max_tokens=8))
    while not engine.idle:
        engine.step()
    assert engine.stats().graphs_captured_while_decoding >= 6, "it would be seen"


def test_stats_tell_how_steps_use_graphs() -> None:
    bench, counts = Bench(), GraphCounts()
    engine = Engine(bench.config, VOCAB_SIZE, bench.executor, graphs=counts)
    counts.steps_without, counts.steps_in_larger = 3, 4
    stats = engine.stats()
    assert (stats.steps_without_graph, stats.steps_in_larger_graph) == (3, 4)
