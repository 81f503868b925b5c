"""Random workloads against the strict fake model, and proof that it would see our mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import hypothesis
import hypothesis.strategies as st
import pytest
from fake_model import VOCAB_SIZE, FakeExecutor, plain_decoding, resolved
from hypothesis import HealthCheck, Phase, given, settings

import runtime.requests
import runtime.sequence
from runtime.admission import WaitingLine
from runtime.batch import LAST, Sampled
from runtime.columns import Columns, Launch
from runtime.config import Resolved
from runtime.engine import Engine
from runtime.messages import BACKGROUND, Output, Pooling, Request, SamplingParams
from runtime.pages import PagePool
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence


@dataclass
class Visit:
    """One request, when it comes and when its caller leaves."""

    request: Request
    arrives: int
    leaves: int | None  # step of its abort


@dataclass
class Workload:
    config: Resolved
    overlap: bool
    front: int = 16  # of the waiting line
    visits: list[Visit] = field(default_factory=list)


TOKENS = st.integers(0, VOCAB_SIZE - 1)
PREFIXES = [[7, 3, 9, 1] * 6, [7, 3, 9, 1, 5] * 5]


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    if draw(st.integers(0, 5)) == 0:
        return SamplingParams(0, pooling=Pooling(draw(st.sampled_from(["last", "mean"]))))
    max_tokens = draw(st.integers(1, 14))
    return SamplingParams(
        max_tokens=max_tokens,
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        # A third of the vocabulary, so that sequences do end early.
        stop_ids=draw(st.just(()) | st.just(tuple(range(0, VOCAB_SIZE, 6)))),
        min_tokens=draw(st.integers(0, max_tokens)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.1])),
        logprobs=draw(st.sampled_from([None, None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    config = resolved(
        page_size=page_size,
        num_pages=draw(st.integers(3, 10) | st.integers(3, 30)),
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 8])),
        max_batched_tokens=draw(st.sampled_from([1, 2, 5, 9, 32])),
        max_model_len=draw(st.sampled_from([20, 40])),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
    )
    workload = Workload(config, draw(st.booleans()), draw(st.sampled_from([1, 2, 16])))
    for number in range(draw(st.integers(1, 10))):
        prefix = draw(st.sampled_from(PREFIXES))
        # Whole pages as often as not: the borders are where mistakes hide.
        shared = draw(st.integers(0, 4)) * page_size + draw(st.sampled_from([0, 0, 1, -1]))
        tokens = prefix[: max(0, shared)] + draw(st.lists(TOKENS, max_size=5))
        request = Request(
            id=100 + number,
            client=number % 2,
            tokens=tokens or [1],
            params=draw(sampling_params()),
            priority=draw(st.sampled_from([0, 0, 1, -1, BACKGROUND, BACKGROUND])),
            salt=draw(st.sampled_from([b"", b"", b"other"])),
        )
        leaves = draw(st.none() | st.none() | st.integers(0, 25))
        workload.visits.append(Visit(request, draw(st.integers(0, 12)), leaves))
    return workload


class Play:
    """Runs a workload and asserts all that must hold on the way."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.executor = FakeExecutor(workload.config, overlap=workload.overlap)
        self.engine = Engine(workload.config, VOCAB_SIZE, self.executor)
        self.engine.scheduler.waiting.FRONT = workload.front
        self.outputs: dict[int, list[Output]] = {visit.request.id: [] for visit in workload.visits}

    def run(self) -> None:
        visits = self.workload.visits
        last = max(max(visit.arrives, visit.leaves or 0) for visit in visits)
        tokens = sum(len(v.request.tokens) + v.request.params.max_tokens for v in visits)
        step = 0
        while step <= last or self.engine.has_work:
            self._come_and_go(step)
            launched = len(self.executor.batches)
            outputs = self.engine.step()
            for output in outputs:
                self._receive(output)
            self.engine.scheduler.check_integrity()
            moved = outputs or len(self.executor.batches) > launched
            assert moved or self.engine.idle, "there is work and nothing moves"
            step += 1
            assert step < last + 20 * tokens + 20, "no end in sight"
        assert self.engine.scheduler.pool.num_used == 0, "pages leak"
        for visit in visits:
            self._check_answer(visit)

    def _come_and_go(self, step: int) -> None:
        for visit in self.workload.visits:
            if visit.arrives == step:
                self.engine.add(visit.request)
        for visit in self.workload.visits:
            if visit.leaves == step:
                self.engine.abort(visit.request.id)
                outputs = self.outputs[visit.request.id]
                alive = visit.arrives <= step and not (outputs and outputs[-1].finish)
                assert not alive or self.engine.has_work, "an abort waits for an answer"
        self.engine.scheduler.check_integrity()

    def _receive(self, output: Output) -> None:
        before = self.outputs[output.id]
        assert not before or before[-1].finish is None, "something came after the end"
        assert output.tokens or output.finish, "an Output that says nothing"
        before.append(output)

    def _check_answer(self, visit: Visit) -> None:
        request, outputs = visit.request, self.outputs[visit.request.id]
        config, params = self.workload.config, visit.request.params
        assert outputs, "a request without an end"
        end = outputs[-1]
        assert end.finish is not None, "a request without an end"
        got = [token for output in outputs for token in output.tokens]
        prompt_len = len(request.tokens)
        most = min(prompt_len + params.max_tokens, config.max_model_len)
        answer = params.pooling is None  # nothing reads its last token
        too_long = prompt_len + answer > config.max_model_len
        if too_long or most - answer > config.num_pages * config.page_size:
            assert end.finish == "error" and not got, "what can never fit is refused"
            return
        want, reason = plain_decoding(request.tokens, params, max_model_len=config.max_model_len)
        if end.finish == "abort":
            assert visit.leaves is not None and got == want[: len(got)]
        else:
            assert (got, end.finish) == (want, reason)
            assert end.stop_id == (want[-1] if want and reason == "stop" else None)
        if got:
            self._check_details(request, outputs)
        if params.pooling is not None and end.finish == "stop":
            assert len(outputs) == 1 and end.vector == bytes(request.tokens)
            assert end.started > 0 and end.cached <= self._most_cached(request)
            assert params.pooling.kind == "last" or not end.cached

    def _check_details(self, request: Request, outputs: list[Output]) -> None:
        first, params = outputs[0], request.params
        assert first.started > 0 and 0 <= first.cached < len(request.tokens)
        assert first.cached % self.workload.config.page_size == 0
        assert first.cached <= self._most_cached(request)
        if params.prompt_logprobs is None:
            assert first.prompt_logprobs is None
        else:
            assert first.cached == 0 and first.prompt_logprobs is not None
            assert first.prompt_logprobs[0] is None
            scores = [s.logprob for s in first.prompt_logprobs[1:] if s is not None]
            assert scores == [-token / VOCAB_SIZE for token in request.tokens[1:]]
        for output in outputs:
            scored = None if params.logprobs is None or not output.tokens else output.tokens
            scores = output.logprobs and [round(-s.logprob * VOCAB_SIZE) for s in output.logprobs]
            assert scores == scored

    def _most_cached(self, request: Request) -> int:
        """The longest beginning in common with what another request of its salt computed."""
        config = self.workload.config
        longest = 0
        for visit in self.workload.visits:
            other = visit.request
            if other.id != request.id and other.salt == request.salt and config.prefix_cache:
                answer, _ = plain_decoding(
                    other.tokens, other.params, max_model_len=config.max_model_len
                )
                pairs = zip(request.tokens, other.tokens + answer, strict=False)
                same = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
                longest = max(longest, len(same))
        return longest


@given(workloads())
@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
def test_every_token_equals_plain_decoding_and_nothing_leaks(workload: Workload) -> None:
    Play(workload).run()


# Mistakes that we might make.  Each takes the true function and returns a wrong one.


def released_twice(true: Callable[..., None]) -> Callable[..., None]:
    def release(self: PagePool, pages: list[int]) -> None:
        true(self, pages)
        true(self, pages[:1])

    return release


def never_released(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, pages: true(self, pages[1:])


def shared_without_a_reference(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, pages: None


def remembered_after_it_was_taken(true: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def take(self: PagePool, count: int) -> list[int]:
        names = dict(self._page_of), dict(self._hash_of)
        pages = true(self, count)
        self._page_of, self._hash_of = names
        return pages

    return take


def salt_ignored(true: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda salt: true(b"")


def chain_without_parent(true: Callable[..., None]) -> Callable[..., None]:
    def extend(hashes: list[bytes], root: bytes, tokens: list[int], page_size: int) -> None:
        for first in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
            one: list[bytes] = []
            true(one, root, tokens[first : first + page_size], page_size)
            hashes += one

    return extend


def hit_of_a_page_not_yet_written(true: Callable[..., bool]) -> Callable[..., bool]:
    def feed(self: Columns, row: Sequence, count: int, new_pages: list[int]) -> bool:
        result = true(self, row, count, new_pages)
        page_size = row.page_room // len(row.pages)
        for page, page_hash in zip(row.pages, row.hash_pages(page_size), strict=False):
            POOLS[-1].remember(page, page_hash)
        return result

    return feed


def forgotten_new_page(true: Callable[..., Launch]) -> Callable[..., Launch]:
    def launch(self: Columns) -> Launch:
        if self.decode_rows and any(self.num_new_pages[: self.decode_rows]):
            index = self.num_new_pages.index(1)
            at = sum(self.num_new_pages[:index])
            self.num_new_pages[index] = 0
            del self.new_pages[at]
        return true(self)

    return launch


def start_off_by_one(true: Callable[..., Launch]) -> Callable[..., Launch]:
    def launch(self: Columns) -> Launch:
        self.starts = [start - (start > 4) for start in self.starts]
        return true(self)

    return launch


def last_fed_stale_after_preemption(true: Callable[..., bool]) -> Callable[..., bool]:
    def feed(self: Columns, row: Sequence, count: int, new_pages: list[int]) -> bool:
        samples = true(self, row, count, new_pages)
        if row.preemptions and samples and row.tokens[row.prompt_len :]:
            self.tokens[-1] = LAST
        return samples

    return feed


def slot_not_started_over(true: Callable[..., None]) -> Callable[..., None]:
    return lambda self, row: None if row.preemptions else true(self, row)


def pages_off_by_one_crossing(true: Callable[..., None]) -> Callable[..., None]:
    def enter(self: Scheduler, sequence: Sequence, pages: list[int]) -> None:
        true(self, sequence, pages)
        sequence.page_room += 1

    return enter


def preempted_loses_a_token(true: Callable[..., None]) -> Callable[..., None]:
    def preempt(self: Scheduler, sequence: Sequence) -> None:
        true(self, sequence)
        if len(sequence.tokens) > sequence.prompt_len:
            sequence.tokens.pop()

    return preempt


def preempted_is_lost(true: Callable[..., None]) -> Callable[..., None]:
    def preempt(self: Scheduler, sequence: Sequence) -> None:
        true(self, sequence)
        self.waiting.front()
        self.waiting.take(sequence)

    return preempt


def ended_row_committed(true: Callable[..., None]) -> Callable[..., None]:
    """A row under way for a sequence that has ended is delivered as if it were alive."""

    def commit(self: Scheduler, launch: Launch, sampled: Sampled) -> None:
        for row, token in zip(launch.sequences, sampled.tokens, strict=True):
            if row.finish == "stop":
                self._outputs.append(Output(row.request.id, [token]))
        true(self, launch, sampled)

    return commit


def abort_without_an_end(true: Callable[..., None]) -> Callable[..., None]:
    def abort(self: Scheduler, request_id: int) -> None:
        true(self, request_id)
        self._outputs[:] = [output for output in self._outputs if output.finish != "abort"]

    return abort


def whole_prompt_looked_up(
    true: Callable[..., list[int] | None],
) -> Callable[..., list[int] | None]:
    def claim(self: Scheduler, sequence: Sequence) -> list[int] | None:
        sequence.tokens.append(0)  # as if the page border did not matter
        pages = true(self, sequence)
        sequence.tokens.pop()
        return pages

    return claim


def admitted_while_its_token_is_under_way(true: Callable[..., None]) -> Callable[..., None]:
    def preempt(self: Scheduler, sequence: Sequence) -> None:
        true(self, sequence)
        sequence.ahead = 0
        self.num_preemptions = 0

    return preempt


def back_at_once_after_making_way(
    true: Callable[..., list[Sequence]],
) -> Callable[..., list[Sequence]]:
    return lambda self, yielded: true(self, False)


def pages_told_in_the_second_step(true: Callable[..., bool]) -> Callable[..., bool]:
    def let_in(
        self: Scheduler, columns: Columns, sequence: Sequence, entered: dict[int, list[int]]
    ) -> bool:
        return true(self, columns, sequence, {})

    return let_in


def head_waits_for_ever(true: Callable[..., None]) -> Callable[..., None]:
    def release(self: PagePool, pages: list[int]) -> None:
        true(self, pages)
        self.num_releases -= 1

    return release


def pages_kept_after_leaving(true: Callable[..., None]) -> Callable[..., None]:
    def leave(self: Scheduler, sequence: Sequence) -> None:
        pages = sequence.pages
        true(self, sequence)
        sequence.pages = pages

    return leave


def nothing_refused(true: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda request, resolved, vocab_size: None


def min_tokens_forgotten(true: Callable[..., Output]) -> Callable[..., Output]:
    def wrong(sequence: Sequence, token: int, logprob: object) -> Output:
        sequence.prompt_len += 1
        output = true(sequence, token, logprob)
        sequence.prompt_len -= 1
        return output

    return wrong


def one_token_too_many(true: Callable[..., None]) -> Callable[..., None]:
    def push(self: WaitingLine, sequence: Sequence) -> None:
        sequence.limit += 1
        true(self, sequence)

    return push


def means_without_their_prefix(true: Callable[..., bool]) -> property:
    return property(lambda self: self.request.params.prompt_logprobs is None)


POOLS: list[PagePool] = []

MISTAKES: list[tuple[object, str, Callable[..., Callable[..., object]]]] = [
    (PagePool, "release", released_twice),
    (PagePool, "release", never_released),
    (PagePool, "release", head_waits_for_ever),
    (PagePool, "share", shared_without_a_reference),
    (PagePool, "take", remembered_after_it_was_taken),
    (runtime.sequence, "extend_chain", chain_without_parent),
    (runtime.sequence, "chain_root", salt_ignored),
    (Sequence, "may_skip", means_without_their_prefix),
    (Columns, "feed", hit_of_a_page_not_yet_written),
    (Columns, "feed", last_fed_stale_after_preemption),
    (Columns, "launch", forgotten_new_page),
    (Columns, "launch", start_off_by_one),
    (Columns, "start", slot_not_started_over),
    (Scheduler, "_enter", pages_off_by_one_crossing),
    (Scheduler, "_preempt", preempted_loses_a_token),
    (Scheduler, "_preempt", preempted_is_lost),
    (Scheduler, "_preempt", admitted_while_its_token_is_under_way),
    (Scheduler, "_may_enter", back_at_once_after_making_way),
    (Scheduler, "_let_in", pages_told_in_the_second_step),
    (Scheduler, "_claim_pages", whole_prompt_looked_up),
    (Scheduler, "commit", ended_row_committed),
    (Scheduler, "abort", abort_without_an_end),
    (Scheduler, "_leave", pages_kept_after_leaving),
    (runtime.requests, "refusal", nothing_refused),
    (runtime.requests, "next_output", min_tokens_forgotten),
    (WaitingLine, "push", one_token_too_many),
]


@pytest.mark.parametrize(
    ("owner", "name", "mistake"), MISTAKES, ids=lambda value: getattr(value, "__name__", None)
)
def test_the_oracle_sees_a_mistake(
    owner: object,
    name: str,
    mistake: Callable[..., Callable[..., object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))

    def fails(workload: Workload) -> bool:
        play = Play(workload)
        POOLS[:] = [play.engine.scheduler.pool]
        try:
            play.run()
        except Exception:
            return True
        return False

    only_search = settings(
        max_examples=1000,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.find(workloads(), fails, settings=only_search)
