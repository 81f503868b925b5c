"""Random workloads for the engine on the strict fake model, and what must hold of the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import hypothesis.strategies as st

from runtime.config import ResolvedConfig
from runtime.engine.loop import Engine
from runtime.grammar.manager import COMPILE_SECONDS, REPLY_TIMEOUT_SECONDS, SILENT
from runtime.messages import BACKGROUND, EngineRequest, PoolingParams, RequestOutput, SamplingParams
from runtime.scheduler.scheduler import SchedulerOutput
from tests.support.engine.bench import resolved
from tests.support.engine.fake_grammar_process import FakeGrammars
from tests.support.engine.fake_model import VOCAB_SIZE, FakeExecutor, plain_decoding


@dataclass
class Visit:
    """One request, when it comes and when its caller leaves."""

    request: EngineRequest
    arrives: int
    leaves: int | None  # step of its abort


@dataclass
class FuzzWorkload:
    config: ResolvedConfig
    overlap: bool
    front: int = 16  # of the waiting line
    right_drafts: float = 0.0  # how likely a draft is right
    spoils: list[tuple[int, int]] = field(default_factory=list)  # number of a step, of its row
    spoils_behind_ends: bool = False  # rows that were queued before a stop id was read
    visits: list[Visit] = field(default_factory=list)
    # If some requests have grammars: how long their process takes for each answer.
    delays: list[float] = field(default_factory=list)
    tick: float = 0.0  # seconds from step to step


TOKENS = st.integers(0, VOCAB_SIZE - 1)
HUNG = 1.5 * REPLY_TIMEOUT_SECONDS  # without an answer the process is abandoned
assert HUNG < COMPILE_SECONDS
# Of the groups of layers; the first token that a query sees of others is the one before it.
WINDOWS = [(0, 2), (0, 5), (0, 5, 5), (0, 3, 13), (0, 1), (4,), (9, 9), (2, 6), (0, 0)]
PREFIXES = [[7, 3, 9, 1] * 6, [7, 3, 9, 1, 5] * 5]


@st.composite
def sampling_params(draw: st.DrawFn, grammars: bool) -> SamplingParams:
    if draw(st.integers(0, 5)) == 0:
        return SamplingParams(0, pooling=PoolingParams(draw(st.sampled_from(["last", "mean"]))))
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
        grammar=draw(st.sampled_from(["", "a form"])) if grammars else "",
    )


@st.composite
def workloads(draw: st.DrawFn) -> FuzzWorkload:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    windows = draw(st.just((0,)) | st.sampled_from(WINDOWS))
    # Of models with recurrent states, which have no windows; drafts need a state each.
    num_states = draw(st.sampled_from([0, 0, 2, 3, 9])) if windows == (0,) else 0
    num_snapshots = draw(st.sampled_from([0, 1, 2, 4, 30])) if num_states else 0
    prefix_cache = draw(st.sampled_from([True, True, True, False]))
    config = resolved(
        page_size=page_size,
        num_pages=draw(st.integers(3, 10) | st.integers(3, 30)) * len(windows),
        group_windows=windows,
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 8])),
        max_batched_tokens=draw(st.sampled_from([1, 2, 5, 9, 32])),
        max_model_len=draw(st.sampled_from([20, 40])),
        prefix_cache=prefix_cache and (num_snapshots > 0 or not num_states),
        num_speculative_tokens=0 if num_states else draw(st.integers(0, 3)),
        num_states=num_states,
        num_snapshots=num_snapshots if prefix_cache else 0,
        snapshot_every=page_size * draw(st.sampled_from([1, 2, 5])),
    )
    workload = FuzzWorkload(config, draw(st.booleans()), draw(st.sampled_from([1, 2, 16])))
    workload.right_drafts = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    if draw(st.integers(0, 2)) == 0:
        workload.spoils = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3))))
    workload.spoils_behind_ends = not config.num_speculative_tokens and draw(st.booleans())
    if draw(st.integers(0, 2)) == 0:
        workload.tick = draw(st.sampled_from([0.01, 2.0]))
        longer = [0.05] if workload.tick < 1 else [3.0, HUNG]
        seconds = st.sampled_from([0.0, 0.015, 0.025, *longer])
        workload.delays = draw(st.lists(seconds, min_size=1, max_size=6))
    for number in range(draw(st.integers(1, 10))):
        prefix = draw(st.sampled_from(PREFIXES))
        # Whole pages as often as not: the borders are where mistakes hide.
        shared = draw(st.integers(0, 4)) * page_size + draw(st.sampled_from([0, 0, 1, -1]))
        tokens = prefix[: max(0, shared)] + draw(st.lists(TOKENS, max_size=5))
        arrives, salt = draw(st.integers(0, 12)), draw(st.sampled_from([b"", b"", b"other"]))
        if workload.visits and draw(st.integers(0, 3)) == 0:  # the next turn after an answer
            visit = draw(st.sampled_from(workload.visits))
            turn = visit.request
            answer, _ = plain_decoding(turn.tokens, turn.params, max_model_len=config.max_model_len)
            tokens = turn.tokens + answer + draw(st.lists(TOKENS, max_size=2))
            if draw(st.booleans()):  # once there is that answer
                arrives, salt = visit.arrives + len(answer) + arrives // 2, turn.salt
        elif workload.visits and draw(st.integers(0, 4)) == 0:  # another choice of the same prompt
            other = workload.visits[-1]
            tokens, arrives = other.request.tokens, other.arrives
        request = EngineRequest(
            id=100 + number,
            client=number % 2,
            tokens=tokens or [1],
            params=draw(sampling_params(bool(workload.delays))),
            priority=draw(st.sampled_from([0, 0, 1, -1, BACKGROUND, BACKGROUND])),
            salt=salt,
            generation_prompt_len=draw(st.sampled_from([0, 0, 1, 3])),
        )
        leaves = draw(st.none() | st.none() | st.integers(0, 25))
        workload.visits.append(Visit(request, arrives, leaves))
    return workload


class Play:
    """Runs a workload and asserts all that must hold on the way."""

    def __init__(self, workload: FuzzWorkload) -> None:
        self.workload = workload
        self.executor = FakeExecutor(
            workload.config, overlap=workload.overlap, right_drafts=workload.right_drafts
        )
        self.grammars = FakeGrammars(workload.delays) if workload.delays else None
        self.engine = Engine(workload.config, VOCAB_SIZE, self.executor, grammars=self.grammars)
        if self.grammars is not None:
            self.engine.requests.clock = self.grammars.clock
        self.engine.requests.waiting.FRONT = workload.front
        self.outputs: dict[int, list[RequestOutput]] = {
            visit.request.id: [] for visit in workload.visits
        }
        self.spoilt: set[int] = set()  # requests whose keys and values were no numbers
        self._steps = 0
        self._ends: dict[int, int] = {}  # by request: the position of its last token
        if workload.spoils_behind_ends:
            for request in [visit.request for visit in workload.visits]:
                answer, _ = self._plain(request)
                self._ends[request.id] = len(request.tokens) + len(answer) - 1
        self._schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = self._spoil  # type: ignore[method-assign]

    def _spoil(self) -> SchedulerOutput | None:
        scheduler_output = self._schedule()
        if scheduler_output is not None:
            ids = scheduler_output.decoding.requests.ids.tolist() + [
                one.request_id for one in scheduler_output.prefilling
            ]
            for number, row in self.workload.spoils:
                if number == self._steps and row < len(ids):
                    self.executor.spoils.add((number, int(scheduler_output.batch.slots[row])))
                    self.spoilt.add(ids[row])
            for row, id in enumerate(ids[: scheduler_output.batch.decode_rows]):
                if scheduler_output.batch.starts[row] == self._ends.get(id):
                    self.executor.spoils.add((self._steps, int(scheduler_output.batch.slots[row])))
            self._steps += 1
        return scheduler_output

    def _plain(self, request: EngineRequest) -> tuple[list[int], str]:
        most = self.workload.config.max_model_len
        return plain_decoding(request.tokens, request.params, max_model_len=most)

    def run(self) -> None:
        visits = self.workload.visits
        last = max(max(visit.arrives, visit.leaves or 0) for visit in visits)
        tokens = sum(len(v.request.tokens) + v.request.params.max_tokens for v in visits)
        step = 0
        while step <= last or not self.engine.idle:
            self._come_and_go(step)
            done, waits = self._steps_done(), self._waits_for_grammars()
            outputs = self.engine.step()
            for output in outputs:
                self._receive(output)
            self.engine.requests.check_integrity()
            moved = outputs or self._steps_done() > done
            waits = waits or self._waits_for_grammars()
            if self.grammars is not None:
                self.grammars.clock.now += self.workload.tick
            assert moved or waits or self.engine.idle, "there is work and nothing moves"
            step += 1
            assert step < last + 40 * tokens + 20, "no end in sight"
        assert self.engine.requests.pool.num_used == 0, "pages leak"
        for visit in visits:
            self._check_answer(visit)

    def _steps_done(self) -> tuple[int, int]:
        """Steps that were queued, and read: a step may free the pages that the next one needs."""
        return len(self.executor.batches), self.engine.requests.num_commits

    def _waits_for_grammars(self) -> bool:
        grammars = self.grammars
        return grammars is not None and (grammars.compiling or bool(grammars.late))

    def _come_and_go(self, step: int) -> None:
        for visit in self.workload.visits:
            if visit.arrives == step:
                self.engine.add(visit.request)
        for visit in self.workload.visits:
            if visit.leaves == step:
                self.engine.abort(visit.request.id)
                outputs = self.outputs[visit.request.id]
                alive = visit.arrives <= step and not (outputs and outputs[-1].finish)
                assert not alive or not self.engine.idle, "an abort waits for an answer"
        self.engine.requests.check_integrity()

    def _receive(self, output: RequestOutput) -> None:
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
        if too_long or config.kv_capacity.needed(most - answer) > config.num_pages:
            left = params.grammar and visit.leaves is not None  # perhaps before it was looked at
            assert end.finish == "error" or (left and end.finish == "abort")
            assert not got, "what can never fit is refused"
            return
        want, reason = self._plain(request)
        if end.finish == "abort":
            assert visit.leaves is not None and got == want[: len(got)]
        elif end.finish == "error":
            silent = request.params.grammar and HUNG in self.workload.delays
            assert request.id in self.spoilt or (silent and end.error == SILENT), end.error
            assert got == want[: len(got)]
        else:
            assert (got, end.finish) == (want, reason)
            assert end.stop_id == (want[-1] if want and reason == "stop" else None)
        if got:
            self._check_details(request, outputs)
        if params.pooling is not None and end.finish == "stop":
            assert len(outputs) == 1 and end.embedding == bytes(request.tokens)
            assert end.started > 0 and end.cached <= self._most_cached(request)
            assert params.pooling.kind == "last" or not end.cached

    def _check_details(self, request: EngineRequest, outputs: list[RequestOutput]) -> None:
        first, params = outputs[0], request.params
        assert first.started > 0 and 0 <= first.cached < len(request.tokens)
        config = self.workload.config
        # A snapshot at the end of an answer may lie within a page.
        assert config.num_snapshots or first.cached % config.page_size == 0
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

    def _most_cached(self, request: EngineRequest) -> int:
        """The longest beginning in common with what another request of its salt computed."""
        config = self.workload.config
        longest = 0
        for visit in self.workload.visits:
            other = visit.request
            if other.id != request.id and other.salt == request.salt and config.prefix_cache:
                answer, _ = self._plain(other)
                pairs = zip(request.tokens, other.tokens + answer, strict=False)
                same = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
                longest = max(longest, len(same))
        return longest
