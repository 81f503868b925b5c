"""Requests: all that are alive, from their arrival to their last Output.

They wait, or have a slot; which of them run in a step is the scheduler's matter (scheduler.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from msgspec import structs

from runtime.admission import WaitingLine, refusal
from runtime.batch import Sampled
from runtime.columns import Launch
from runtime.config import Resolved
from runtime.messages import FinishReason, Output, Request, TokenLogprob
from runtime.outputs import News, ending, explained, next_output, pooled
from runtime.pages import PagePool
from runtime.running import Running
from runtime.sequence import Sequence

log = logging.getLogger("wavefill.requests")


class Requests:
    def __init__(
        self,
        resolved: Resolved,
        vocab_size: int,
        *,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resolved = resolved
        self.vocab_size = vocab_size
        self.pool = PagePool(resolved.num_pages)
        self.waiting = WaitingLine()
        self.running = Running(resolved.max_num_seqs)
        self.prompt_tokens: int = 0
        self.cached_tokens: int = 0
        self.generated_tokens = 0
        self._live: dict[int, Sequence] = {}
        self._told_ids: list[int] = []
        self._told_tokens: list[int] = []
        self._outputs: list[Output] = []
        self._arrivals = 0
        self._draw_seed = draw_seed
        self.clock = clock

    @property
    def idle(self) -> bool:
        """No request is alive and all that was made was taken."""
        return not self._live and not self._outputs and not self._told_ids

    def take_news(self) -> News:
        """What was made since the last call."""
        news = News(self._told_ids, self._told_tokens, self._outputs)
        self._told_ids, self._told_tokens, self._outputs = [], [], []
        return news

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Let a request wait; one that can never run is answered with an error instead."""
        if request.id in self._live:
            raise ValueError(f"request id {request.id} is in use: ids must be unique")
        error = refusal(request, self.resolved, self.vocab_size)
        if error is not None:
            output = Output(request.id, [], finish="error", error=error)
            self._outputs.append(output)
            return
        seed = request.params.seed
        sequence = Sequence(
            request,
            seed=self._draw_seed() if seed is None else seed,
            order=self._arrivals,
            max_model_len=self.resolved.max_model_len,
        )
        self._arrivals += 1
        self._live[request.id] = sequence
        self.waiting.push(sequence)

    def abort(self, request_id: int) -> None:
        """End a request wherever it is.  One that has ended already needs no answer."""
        self.end(request_id, "abort")

    def end(
        self,
        request_id: int,
        finish: FinishReason,
        *,
        error: str | None = None,
        refused: bool = False,
    ) -> None:
        """End a request between two tokens, wherever it is.  See Output for the fields."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            output = ending(sequence, finish, error=error)
            self._end(sequence, structs.replace(output, refused=refused))

    # Learning what a step did.

    def commit(self, launch: Launch, sampled: Sampled) -> None:
        """Take in the results of a step; the next one may have been scheduled already."""
        batch, sequences, _load = launch
        scored, vectors = sampled.logprobs, sampled.vectors
        plain = scored is None and sampled.prompt_logprobs is None and not sampled.errors
        done = self._commit_plain(launch, sampled.tokens) if plain else 0
        for index in range(done, len(sequences)):
            sequence, samples, token = sequences[index], batch.sample[index], sampled.tokens[index]
            if samples:
                sequence.ahead -= 1
            if sequence.finish is not None:
                continue  # it ended while this row was under way
            try:
                if not plain and self._note_details(sequence, index, sampled):
                    continue
                start = batch.starts[index]
                self._remember(sequence, start, start + batch.q_lens[index])
                if not samples:
                    if index in vectors:
                        self._end(sequence, pooled(sequence, vectors[index]))
                    continue
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"the executor sampled {token}, not a token id of the model")
                sequence.tokens.append(token)
                self.generated_tokens += 1
                self._deliver(sequence, token, None if scored is None else scored[index])
            except Exception as error:
                self._end_broken(sequence, error)

    def _commit_plain(self, launch: Launch, tokens: list[int]) -> int:
        """The rows that decode, where no row has more to tell than its token.

        Returns their number.  Most rows of most steps are these: at 256 of them this loop is most
        of what a step costs the host.
        """
        rows = launch.batch.decode_rows
        if not rows or min(tokens[:rows]) < 0 or max(tokens[:rows]) >= self.vocab_size:
            return 0
        tell_id, tell_token = self._told_ids.append, self._told_tokens.append
        told = len(self._told_ids)
        columns = (launch.sequences[:rows], launch.batch.starts[:rows], tokens[:rows])
        for sequence, start, token in zip(*columns, strict=True):
            sequence.ahead -= 1
            known = sequence.tokens
            if len(known) < sequence.quiet_until and token not in sequence.stop_ids:
                known.append(token)
                tell_id(sequence.request_id)
                tell_token(token)
            elif sequence.finish is None:  # else it ended while this row was under way
                try:
                    self._commit_one(sequence, start, token)
                except Exception as error:
                    self._end_broken(sequence, error)
        self.generated_tokens += len(self._told_ids) - told
        return rows

    def _commit_one(self, sequence: Sequence, start: int, token: int) -> None:
        """A token with which more may happen than that somebody is told of it."""
        self._remember(sequence, start, start + 1)
        sequence.tokens.append(token)
        ends = token in sequence.stop_ids or len(sequence.tokens) >= sequence.limit
        if ends or not sequence.announced:
            self.generated_tokens += 1
            self._deliver(sequence, token, None)
        else:
            self._told_ids.append(sequence.request_id)
            self._told_tokens.append(token)
        if sequence.finish is None:
            sequence.be_quiet(self.resolved.page_size)

    def _note_details(self, sequence: Sequence, index: int, sampled: Sampled) -> bool:
        """Errors and prompt scores of one row.  True if the row failed, which ends its request."""
        error = sampled.errors.get(index)
        if error is not None:
            # Perhaps what its pages hold is to blame: nobody else shall find them.
            self.pool.forget(sequence.pages)
            self._end(sequence, ending(sequence, "error", error=error))
            return True
        scores = sampled.prompt_logprobs[index] if sampled.prompt_logprobs else None
        if scores is not None and not sequence.announced:
            if sequence.prompt_scores is None:
                sequence.prompt_scores = [None]  # nothing comes before the first token
            sequence.prompt_scores += scores
        return False

    def _remember(self, sequence: Sequence, start: int, end: int) -> None:
        """Its positions start .. end - 1 are written: perhaps they fill pages."""
        page_size = self.resolved.page_size
        # A sequence that was preempted in the meantime has no pages.
        if end % page_size < end - start and self.resolved.prefix_cache and sequence.pages:
            hashes = sequence.hash_pages(page_size)
            for index in range(start // page_size, end // page_size):
                self.pool.remember(sequence.pages[index], hashes[index])

    def _deliver(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """The newest token of a sequence, which may be its last."""
        output = next_output(sequence, token, logprob)
        if output.finish is None:
            self._outputs.append(output)
        else:
            self._end(sequence, output)

    def _end(self, sequence: Sequence, output: Output) -> None:
        """The one end of a request: its pages and slot are free at once, `output` is its last."""
        self._outputs.append(explained(sequence, output, self.running.mean_batch(sequence)))
        sequence.finish = output.finish
        sequence.quiet_until = 0
        del self._live[sequence.request_id]
        if sequence.slot < 0:
            self.waiting.note_end(sequence)
        else:
            self._leave(sequence)

    def _end_broken(self, sequence: Sequence, error: Exception) -> None:
        """Something went wrong in this request's own handling: the others go on."""
        log.error("request %d failed", sequence.request_id, exc_info=error)
        self._end(sequence, ending(sequence, "error", error=f"internal error: {error}"))

    def _leave(self, sequence: Sequence) -> None:
        """Out of its slot, its pages free."""
        self.running.leave(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.page_room = 0

    def check_integrity(self) -> None:
        """Assert that pages, slots and the lists of sequences agree.  For tests: it is slow."""
        running = self.running.all()
        self.running.check_integrity()
        self.waiting.check_integrity()
        self.pool.check_integrity([sequence.pages for sequence in running])
        assert len(running) + len(self.waiting) == len(self._live)
        for sequence in running:
            assert sequence.page_room == len(sequence.pages) * self.resolved.page_size
            assert sequence.launched <= sequence.page_room
