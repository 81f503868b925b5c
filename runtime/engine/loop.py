"""Engine: connects the scheduler to an executor, one step at a time.

A step is scheduled and queued on the device before the results of the previous one are read, so the
device never waits for the host.  The order is the same for every step; an executor that computes
synchronously (on a CPU) sets `overlap = False`, and its results are read at once.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from runtime.config import ResolvedConfig
from runtime.grammar.manager import GrammarManager, GrammarUpdates
from runtime.messages import EngineRequest, RequestOutput
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.scheduler.commit import NO_TOKEN_COLUMNS, Committer, TokenColumns
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.scheduler import Scheduler, SchedulerOutput
from runtime.stats import STEP_SECONDS_EDGES, STEP_TOKENS_EDGES, GraphCounts, ImageCounts, Stats

COMPILE_WAIT_SECONDS = 0.002  # at most in one step: a message may arrive meanwhile
IDLE_BEFORE_PREPARE_SECONDS = 0.5
MISSING_MASK = "the grammar process returned no mask for the next token"


class EngineOutputs(NamedTuple):
    """All outputs of a step: requests that have a token and nothing else, and the others."""

    columns: TokenColumns
    outputs: list[RequestOutput]

    def all(self) -> list[RequestOutput]:
        ids, tokens, _ = self.columns
        pairs = zip(ids.tolist(), tokens.tolist(), strict=True)
        return [RequestOutput(id, [token]) for id, token in pairs] + self.outputs


class PendingOutput(Protocol):
    """Results that the device may still be computing."""

    def wait(self) -> ModelRunnerOutput: ...


class Executor(Protocol):
    """Runs batches in the order of the calls; the interface between the host and device sides."""

    @property
    def overlap(self) -> bool:
        """True if forward() and sample() return before the device is done."""
        ...

    def forward(self, batch: Batch) -> None: ...

    def sample(self, batch: Batch, masks: Masks | None = None) -> PendingOutput:
        """Sample the batch of forward(), of which fewer rows may sample by now: tokens that the
        executor samples for the others are discarded."""
        ...

    def prepare(self) -> bool:
        """Do a tenth of a second of deferred work while idle.  True if more is left."""
        ...


class Engine:
    """Takes requests and returns outputs.  Not thread-safe: one thread owns it."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        vocab_size: int,
        executor: Executor,
        *,
        grammars: GrammarManager | None = None,
        graphs: GraphCounts | None = None,  # of the executor, kept up to date, as are
        images: ImageCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
        index: int = 0,
    ) -> None:
        """index: of several engines, whose requests without a seed do not get the same ones"""
        seed_rng = random.Random(f"{resolved.seed}/{index}" if index else resolved.seed)
        self.requests = RequestTable(
            resolved, vocab_size, next_seed=lambda: seed_rng.getrandbits(63), clock=clock
        )
        self.scheduler = Scheduler(self.requests)
        self.committer = Committer(self.requests)
        self._executor = executor
        self._grammars = grammars
        self._graphs, self._images = graphs or GraphCounts(), images or ImageCounts()
        self._captures_seen, self._captures_while_decoding = self._graphs.captures, 0
        self._clock = clock
        # The step in flight, its results, and when it was queued.
        self._in_flight: tuple[SchedulerOutput, PendingOutput, float] | None = None
        self._last_commit_at = 0.0
        self._steps = 0
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._seconds_counts = [0] * (len(STEP_SECONDS_EDGES) + 1)
        self._tokens_counts = [0] * (len(STEP_TOKENS_EDGES) + 1)
        self._seconds_sum = 0.0
        self._tokens_sum = 0

    @property
    def idle(self) -> bool:
        """Nothing to compute, to read or to deliver: no step() is needed before the next add()."""
        return not (self._grammars and self._grammars.compiling) and self._nothing_queued

    @property
    def _nothing_queued(self) -> bool:
        requests = self.requests
        return self._in_flight is None and not requests.live and not requests.outputs

    def prepare(self) -> bool:
        """Let the executor do deferred work while idle.  True if more is left.

        It waits IDLE_BEFORE_PREPARE_SECONDS, so as not to delay a client's next request.
        """
        idle = self.idle and self._clock() - self._last_commit_at >= IDLE_BEFORE_PREPARE_SECONDS
        more = idle and self._executor.prepare()
        self._count_captures()
        return more

    def add(self, request: EngineRequest) -> None:
        """Queue a request.  One that can never run is answered by the next step().

        Raises ValueError if its id is in use, which is a bug of the calling process.
        """
        if not request.params.grammar:
            self.requests.add(request)
        elif self._grammars is None:
            self._reject(request, "this engine has no grammars")
        else:
            self._grammars.submit(request)

    def _reject(self, request: EngineRequest, error: str, *, is_request_error: bool = True) -> None:
        output = RequestOutput(
            request.id, [], finish="error", error=error, is_request_error=is_request_error
        )
        self.requests.outputs.append(output)

    def abort(self, request_id: int) -> None:
        """Finish a request at once; the next step() returns its last output, with finish="abort".

        An unknown id is ignored: its request has finished already.
        """
        if self._grammars is not None and self._grammars.release(request_id):
            self.requests.outputs.append(RequestOutput(request_id, [], finish="abort"))
        self.requests.finish_request(request_id, "abort")

    def step(self) -> list[RequestOutput]:
        """Queue one step and read the previous one.  Returns the outputs since the last call.

        Exceptions of the executor are fatal for the engine and pass through.
        """
        return self.step_columns().all()

    def step_columns(self) -> EngineOutputs:
        """step() with its outputs in columns, which cost less than one object a token."""
        began = self._clock()
        grammars = self._grammars
        if grammars is not None and grammars.compiling:
            self._take_compiled(grammars)
        if grammars is not None and grammars.live:
            self._apply_grammar_updates(grammars)
        scheduler_output = self.scheduler.schedule()
        queued_at = self._clock()
        if scheduler_output:
            self._executor.forward(scheduler_output.batch)
        columns = self._commit_in_flight()
        if scheduler_output:
            scheduler_output, masks = self._collect_masks(scheduler_output)
            self._in_flight = (
                scheduler_output,
                self._executor.sample(scheduler_output.batch, masks),
                queued_at,
            )
            if not self._executor.overlap:
                columns = self._commit_in_flight()
            self._record_stats(len(scheduler_output.batch.tokens), self._clock() - began)
        elif grammars is not None and grammars.late:
            self._apply_grammar_updates(grammars, grammars.late)  # no other work: wait for them
        return self._take_outputs(columns)

    def _commit_in_flight(self) -> TokenColumns:
        if self._in_flight is None:
            return NO_TOKEN_COLUMNS
        scheduler_output, pending, queued_at = self._in_flight
        self._in_flight = None
        model_output = pending.wait()
        # The device began when the step was queued, or when the previous step ended.  Where the
        # host took long to queue the next one, only the device knows when this one ended.
        began, self._last_commit_at = max(queued_at, self._last_commit_at), self._clock()
        seconds = model_output.seconds
        if seconds is None:
            seconds = self._last_commit_at - began
        self.scheduler.times.record(scheduler_output.load, seconds)
        columns = self.committer.commit(scheduler_output, model_output)
        if self._grammars is not None and self._grammars.live:
            rows = scheduler_output.sampling_rows(self.requests.live, self._grammars.live)
            self._grammars.advance([(id, model_output.sampled(row)) for row, id in rows])
        return columns

    def _take_compiled(self, grammars: GrammarManager) -> None:
        """Queue the requests whose grammar is compiled; waits a moment if no other work is left."""
        wait = COMPILE_WAIT_SECONDS if self._nothing_queued else 0.0
        for request, error, is_request_error in grammars.take_compiled(wait):
            if error is None:
                self.requests.add(request)
            else:
                self._reject(request, error, is_request_error=is_request_error)

    def _apply_grammar_updates(
        self, grammars: GrammarManager, ids: Iterable[int] = ()
    ) -> GrammarUpdates:
        """Poll for the masks of `ids`; finish or resume requests as the grammar process reports."""
        updates = grammars.poll(ids)
        for id in updates.ended:
            self.requests.finish_request(id, "stop")
        for id, error in updates.errors.items():
            error = f"the grammar is too complex or leads nowhere: {error}"
            self.requests.finish_request(id, "error", error=error, is_request_error=True)
        for id, reason in updates.lost.items():
            self.requests.finish_request(id, "error", error=reason)
        for id in updates.arrived:
            self.requests.resume_held(id)
        return updates

    def _collect_masks(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[SchedulerOutput, Masks | None]:
        """The step with the rows held whose masks are late, and the masks of the other rows.

        All earlier tokens are committed, and the forward pass is queued.
        """
        if self._grammars is None or not self._grammars.live:
            return scheduler_output, None
        rows = scheduler_output.sampling_rows(self.requests.live, self._grammars.live)
        updates = self._apply_grammar_updates(self._grammars, [id for _, id in rows])
        if updates.late:
            late = [row for row, id in rows if id in updates.late]
            scheduler_output = self.scheduler.hold_rows(scheduler_output, late)
        if any(updates):
            rows = scheduler_output.sampling_rows(self.requests.live, self._grammars.live)
        masks = self._grammars.masks(rows)
        if masks is None or len(masks.rows) < len(rows):
            # An error is better than an answer that violates its grammar.
            masked = () if masks is None else masks.rows
            for id in [id for row, id in rows if row not in masked]:
                self.requests.finish_request(id, "error", error=MISSING_MASK)
        return scheduler_output, masks

    def _take_outputs(self, columns: TokenColumns) -> EngineOutputs:
        outputs, self.requests.outputs = self.requests.outputs, []
        if self._grammars is not None and self._grammars.live:
            for output in outputs:
                if output.finish is not None:
                    self._grammars.release(output.id)
        return EngineOutputs(columns, outputs)

    def _count_captures(self) -> None:
        captures = self._graphs.captures - self._captures_seen
        if captures and len(self.requests.decoding.slots):
            self._captures_while_decoding += captures
        self._captures_seen += captures

    def _record_stats(self, tokens: int, seconds: float) -> None:
        self._count_captures()
        self._steps += 1
        self._step_tokens, self._step_seconds = tokens, seconds
        self._tokens_counts[bisect_left(STEP_TOKENS_EDGES, tokens)] += 1
        self._seconds_counts[bisect_left(STEP_SECONDS_EDGES, seconds)] += 1
        self._tokens_sum += tokens
        self._seconds_sum += seconds

    def stats(self) -> Stats:
        requests, pool = self.requests, self.requests.pool
        return Stats(
            running=len(requests.prefilling) + len(requests.decoding.slots),
            waiting=requests.waiting.count,
            pages_used=pool.num_pages - pool.num_free,
            pages_total=pool.num_pages,
            steps=self._steps,
            step_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
            prompt_tokens=self.scheduler.admission.prompt_tokens,
            cached_tokens=self.scheduler.admission.cached_tokens,
            generated_tokens=self.committer.generated_tokens,
            preemptions=requests.num_preemptions,
            step_seconds_counts=tuple(self._seconds_counts),
            step_seconds_sum=self._seconds_sum,
            step_tokens_counts=tuple(self._tokens_counts),
            step_tokens_sum=self._tokens_sum,
            steps_without_graph=self._graphs.steps_without,
            steps_in_larger_graph=self._graphs.steps_in_larger,
            graphs_captured_while_decoding=self._captures_while_decoding,
            step_predictions=self.scheduler.times.num_predictions,
            step_prediction_error=self.scheduler.times.prediction_error,
            group_pages_used=tuple(pool.used_by_group),
            group_pages_cached=tuple(pool.cached_by_group),
            states_used=requests.states.num_used if requests.states.num_states else 0,
            snapshots_used=requests.snapshots.num_used if requests.snapshots.count else 0,
            images_encoded=self._images.encoded,
            image_cache_hits=requests.images.num_hits,
            image_encoder_seconds=self._images.seconds,
        )
