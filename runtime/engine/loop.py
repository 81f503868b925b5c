"""Engine: the loop that joins the scheduler and an executor, one step at a time.

A step is scheduled and queued on the device before the results of the one before are read, so the
device never waits for the host.  One order serves every kind of step; an executor that computes
while it is called (a CPU) sets `overlap = False` and its results are read at once.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Protocol

from runtime.config import ResolvedConfig
from runtime.grammar.manager import Answers, GrammarManager
from runtime.messages import (
    STEP_SECONDS_EDGES,
    STEP_TOKENS_EDGES,
    EngineRequest,
    RequestOutput,
    Stats,
)
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.scheduler.batch_builder import SchedulerOutput
from runtime.scheduler.outputs import EngineOutputs
from runtime.scheduler.scheduler import Scheduler

COMPILE_WAIT_SECONDS = 0.002  # in one step: a message may come meanwhile
QUIET_SECONDS = 0.5
UNMASKED = "the grammar process did not say what may come next"


class PendingOutput(Protocol):
    """Results that the device may still be computing."""

    def wait(self) -> ModelRunnerOutput: ...


class Executor(Protocol):
    """Runs batches in the order of the calls, as a Runner does; no device is known here."""

    @property
    def overlap(self) -> bool:
        """True if forward() and sample() return before the device is done."""
        ...

    def forward(self, batch: Batch) -> None: ...

    def sample(self, batch: Batch, masks: Masks | None = None) -> PendingOutput:
        """Of the batch of forward(), in which fewer rows may sample by now: what an executor
        draws for the others all the same is not used."""
        ...

    def prepare(self) -> bool:
        """Use an idle moment, a tenth of a second of it.  True if there is more to do."""
        ...


class Engine:
    """Requests in, Outputs out.  Not thread-safe: one thread owns it."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        vocab_size: int,
        executor: Executor,
        *,
        grammars: GrammarManager | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        seed_rng = random.Random(resolved.seed)
        self.scheduler = Scheduler(
            resolved, vocab_size, next_seed=lambda: seed_rng.getrandbits(63), clock=clock
        )
        self._executor = executor
        self._grammars = grammars
        self._clock = clock
        self._refusals: list[RequestOutput] = []
        self._under_way: tuple[SchedulerOutput, PendingOutput, float] | None = (
            None  # and when it was queued
        )
        self._read_at = 0.0  # when the results of a step were read last
        self._steps = 0
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._seconds_counts = [0] * (len(STEP_SECONDS_EDGES) + 1)
        self._tokens_counts = [0] * (len(STEP_TOKENS_EDGES) + 1)
        self._seconds_sum = 0.0
        self._tokens_sum = 0

    @property
    def idle(self) -> bool:
        """Nothing to compute, to read or to deliver: step() need not be called before add()."""
        return self._under_way is None and self.scheduler.idle and not self._waiting

    @property
    def _waiting(self) -> bool:
        """Somebody waits for a grammar, or for the word that there is none."""
        compiling = self._grammars is not None and self._grammars.compiling
        return compiling or bool(self._refusals)

    @property
    def has_work(self) -> bool:
        return not self.idle

    def prepare(self) -> bool:
        """Let the executor use a moment without work.  True if it could use another.

        Not between two requests of somebody who waits for each answer: the second would wait.
        """
        quiet = self.idle and self._clock() - self._read_at >= QUIET_SECONDS
        return quiet and self._executor.prepare()

    def add(self, request: EngineRequest) -> None:
        """Queue a request.  One that can never run is answered by the next step().

        Raises ValueError if its id is in use: that is a mistake of the caller's, not the user's.
        """
        if not request.params.grammar:
            self.scheduler.add(request)
        elif self._grammars is None:
            self._refuse(request, "this engine has no grammars")
        else:
            self._grammars.begin(request)

    def _refuse(self, request: EngineRequest, error: str, *, refused: bool = True) -> None:
        output = RequestOutput(request.id, [], finish="error", error=error, refused=refused)
        self._refusals.append(output)

    def abort(self, request_id: int) -> None:
        """End a request at once; its last Output, with finish="abort", comes with the next step().

        An id that is not known belongs to a request that has had its end.
        """
        if self._grammars is not None and self._grammars.release(request_id):
            self._refusals.append(RequestOutput(request_id, [], finish="abort"))
        self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Queue one step, read the one before.  Returns the Outputs made since the last call.

        What the executor raises is fatal for the engine and passes through.
        """
        return self.advance().all()

    def advance(self) -> EngineOutputs:
        """step(), which says what it made in the form that costs least."""
        began = self._clock()
        grammars = self._grammars
        if grammars is not None and grammars.compiling:
            self._take_compiled(grammars)
        if grammars is not None and grammars.open:
            self._hear(grammars)
        launch = self.scheduler.schedule()
        queued = self._clock()
        if launch:
            self._executor.forward(launch.batch)
        self._read()
        if launch:
            launch, masks = self._masks(launch)
            self._under_way = (launch, self._executor.sample(launch.batch, masks), queued)
            if not self._executor.overlap:
                self._read()
            self._count(launch.batch.num_tokens, self._clock() - began)
        elif grammars is not None and grammars.late:
            self._hear(grammars, grammars.late)  # there is nothing else to do
        return self._take_outputs()

    def _read(self) -> None:
        if self._under_way is not None:
            launch, pending, queued = self._under_way
            self._under_way = None
            sampled = pending.wait()
            # The device began when it was told to, or when it was done with the step before.
            began, self._read_at = max(queued, self._read_at), self._clock()
            self.scheduler.times.record(launch.load, self._read_at - began)
            self.scheduler.commit(launch, sampled)
            if self._grammars is not None and self._grammars.open:
                tokens = sampled.tokens.tolist()
                rows = self.scheduler.sampling(launch, self._grammars.live)
                self._grammars.advance([(id, tokens[row]) for row, id in rows])

    def _take_compiled(self, grammars: GrammarManager) -> None:
        """Let those run whose grammar is ready.  With nothing else to do, wait a moment for it."""
        nothing_else = self._under_way is None and self.scheduler.idle and not self._refusals
        wait = COMPILE_WAIT_SECONDS if nothing_else else 0.0
        for request, error, is_request_error in grammars.compiled(wait):
            if error is None:
                self.scheduler.add(request)
            else:
                self._refuse(request, error, refused=is_request_error)

    def _hear(self, grammars: GrammarManager, ids: Iterable[int] = ()) -> Answers:
        """Do what the grammar process has said; first wait a moment for its word on `ids`."""
        answers = grammars.wait_advanced(ids)
        for id in answers.ended:
            self.scheduler.end(id, "stop")
        for id, error in answers.errors.items():
            error = f"the grammar is too complex or leads nowhere: {error}"
            self.scheduler.end(id, "error", error=error, refused=True)
        for id, reason in answers.lost.items():
            self.scheduler.end(id, "error", error=reason)
        for id in answers.here:
            self.scheduler.go_on(id)
        return answers

    def _masks(self, launch: SchedulerOutput) -> tuple[SchedulerOutput, Masks | None]:
        """What the rows may take, and the step without those whose mask is late.

        All earlier tokens are known, and the forward pass is queued.
        """
        if self._grammars is None or not self._grammars.open:
            return launch, None
        rows = self.scheduler.sampling(launch, self._grammars.live)
        answers = self._hear(self._grammars, [id for _, id in rows])
        if answers.late:
            late = [row for row, id in rows if id in answers.late]
            launch = self.scheduler.hold_back(launch, late)
        if any(answers):
            rows = self.scheduler.sampling(launch, self._grammars.live)
        masks = self._grammars.masks(rows)
        if masks is None or len(masks.rows) < len(rows):
            # Better no answer than one that breaks the form that was promised.
            masked = () if masks is None else masks.rows
            for id in [id for row, id in rows if row not in masked]:
                self.scheduler.end(id, "error", error=UNMASKED)
        return launch, masks

    def _take_outputs(self) -> EngineOutputs:
        engine_outputs = self.scheduler.take_outputs()
        if self._refusals:
            engine_outputs.outputs.extend(self._refusals)
            self._refusals = []
        if self._grammars is not None and self._grammars.open:
            for output in engine_outputs.outputs:
                if output.finish is not None:
                    self._grammars.release(output.id)
        return engine_outputs

    def _count(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        self._step_tokens, self._step_seconds = tokens, seconds
        self._tokens_counts[bisect_left(STEP_TOKENS_EDGES, tokens)] += 1
        self._seconds_counts[bisect_left(STEP_SECONDS_EDGES, seconds)] += 1
        self._tokens_sum += tokens
        self._seconds_sum += seconds

    def stats(self) -> Stats:
        scheduler = self.scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=scheduler.pool.num_used,
            pages_total=scheduler.pool.num_pages,
            steps=self._steps,
            step_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=scheduler.generated_tokens,
            preemptions=scheduler.num_preemptions,
            step_seconds_counts=tuple(self._seconds_counts),
            step_seconds_sum=self._seconds_sum,
            step_tokens_counts=tuple(self._tokens_counts),
            step_tokens_sum=self._tokens_sum,
        )
