"""Requests: all that are alive, from their arrival to their last Output.

They wait, or have a slot; which of them run in a step is the scheduler's matter (scheduler.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from runtime.config import ResolvedConfig
from runtime.messages import EngineRequest, FinishReason, RequestOutput, TokenLogprob
from runtime.scheduler.batch import LAST, Batch, Int64Array, ModelRunnerOutput
from runtime.scheduler.batch_builder import SchedulerOutput
from runtime.scheduler.decode_columns import NONE
from runtime.scheduler.outputs import EngineOutputs, ending, explained, next_output, pooled
from runtime.scheduler.page_pool import PagePool
from runtime.scheduler.running import Running
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.waiting_queue import WaitingQueue, validation_error

log = logging.getLogger("wavefill.requests")

NO_TOKEN = (
    "no token is left to choose from: `allowed_token_ids`, or the form of the answer, allows none "
    "that `min_tokens`, which keeps the answer from ending, does not rule out: allow other tokens, "
    "or lower `min_tokens`"
)
# Ids of requests, a token for each, their clients.
TokenColumns = tuple[Int64Array, NDArray[np.int32], Int64Array]
NOTHING: TokenColumns = (NONE, NONE.astype(np.int32), NONE)


class RequestTable:
    def __init__(
        self,
        resolved: ResolvedConfig,
        vocab_size: int,
        *,
        next_seed: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.resolved = resolved
        self.vocab_size = vocab_size
        self.pool = PagePool(resolved.num_pages)
        self.waiting = WaitingQueue()
        self.running = Running(resolved.max_num_seqs, vocab_size, resolved.page_size)
        self.prompt_tokens: int = 0
        self.cached_tokens: int = 0
        self.generated_tokens = 0
        self._live: dict[int, Sequence] = {}
        self._token_columns: list[TokenColumns] = []
        self._outputs: list[RequestOutput] = []
        self._arrivals = 0
        self._next_seed = next_seed
        self.clock = clock

    @property
    def idle(self) -> bool:
        """No request is alive and all that was made was taken."""
        return not self._live and not self._outputs and not self._token_columns

    def take_outputs(self) -> EngineOutputs:
        """What was made since the last call."""
        engine_outputs = EngineOutputs(*_joined(self._token_columns), self._outputs)
        self._token_columns, self._outputs = [], []
        return engine_outputs

    # Requests come and go.

    def add(self, request: EngineRequest) -> None:
        """Let a request wait; one that can never run is answered with an error instead."""
        if request.id in self._live:
            raise ValueError(f"request id {request.id} is in use: ids must be unique")
        error = validation_error(request, self.resolved, self.vocab_size)
        if error is not None:
            output = RequestOutput(request.id, [], finish="error", error=error)
            self._outputs.append(output)
            return
        seed = request.params.seed
        sequence = Sequence(
            request,
            seed=self._next_seed() if seed is None else seed,
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

    def commit(self, scheduled: SchedulerOutput, sampled: ModelRunnerOutput) -> None:
        """Take in the results of a step; the next one may have been scheduled already."""
        others = self._commit_plain(scheduled, sampled) if scheduled.batch.decode_rows else []
        for index, sequence in self._alive(scheduled, others):
            if sequence.slot < 0 and scheduled.batch.sample[index]:
                sequence.unread_tokens -= 1
            try:
                self._commit_row(sequence, index, scheduled.batch, sampled)
            except Exception as error:
                self._end_broken(sequence, error)

    def sampling(self, scheduled: SchedulerOutput, wanted: Container[int]) -> list[tuple[int, int]]:
        """(row, request id) of the rows that sample, of some requests that have not ended since."""
        ids = scheduled.decoding.owners.ids.tolist()
        alive = self._alive(scheduled, [row for row, id in enumerate(ids) if id in wanted])
        return [
            (row, one.request_id)
            for row, one in alive
            if one.request_id in wanted and scheduled.batch.sample[row]
        ]

    def _alive(
        self, scheduled: SchedulerOutput, rows: Iterable[int]
    ) -> Iterator[tuple[int, Sequence]]:
        """Of some of the rows that decode and all that follow, those that have not ended."""
        owners, order = scheduled.decoding.owners, scheduled.decoding.owners.order
        for row in rows:
            sequence = self._live.get(int(owners.ids[row]))
            if sequence is not None and sequence.order == order[row]:
                yield row, sequence
        for row, sequence in enumerate(scheduled.prompts, scheduled.batch.decode_rows):
            if sequence.finish is None:
                yield row, sequence

    def _commit_plain(self, scheduled: SchedulerOutput, sampled: ModelRunnerOutput) -> list[int]:
        """The rows that have no more to tell than their token.  Returns the others.

        Most rows of most steps are plain: with 256 of them this is most of what a step costs.
        """
        rows = scheduled.decoding
        owners, tokens = rows.owners, sampled.tokens[: len(rows.starts)]
        irregular_rows = [
            row for row in sampled.rows_with_more() + scheduled.left_out if row < len(tokens)
        ]
        full, others = self.running.decoding.commit(rows, tokens, irregular_rows)
        for sequence, content in full:
            try:
                self._cache_page(sequence, content)
            except Exception as error:
                self._end_broken(sequence, error)
        ids, clients = owners.ids, owners.clients
        if others:
            kept = np.ones(len(ids), dtype=np.bool_)
            kept[others] = False
            ids, clients, tokens = ids[kept], clients[kept], tokens[kept]
        self.generated_tokens += len(ids)
        self._token_columns.append((ids, tokens, clients))
        return others

    def _cache_page(self, sequence: Sequence, content: bytes) -> None:
        if not self.resolved.prefix_cache:
            return
        if sequence.hash_page(content, self.resolved.page_size):
            hashes = sequence.hashes
            self.pool.cache_page(sequence.pages[len(hashes) - 1], hashes[-1])
        else:
            written = len(sequence.tokens)
            self._cache_pages(sequence, written - 1, written)

    def _commit_row(
        self, sequence: Sequence, index: int, batch: Batch, sampled: ModelRunnerOutput
    ) -> None:
        """A row of which more may have to be told, of a sequence that is alive."""
        if self._record_details(sequence, index, sampled):
            return
        decodes = self.running.decoding.has(sequence)
        if decodes:
            self.running.decoding.flush_tokens(sequence)
        start = int(batch.starts[index])
        self._cache_pages(sequence, start, start + int(batch.q_lens[index]))
        if not batch.sample[index]:
            if index in sampled.embeddings:
                self._end(sequence, pooled(sequence, sampled.embeddings[index]))
            return
        token = int(sampled.tokens[index])
        if token == LAST:
            self.end(sequence.request_id, "error", error=NO_TOKEN, refused=True)
            return
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"the executor sampled {token}, not a token id of the model")
        sequence.tokens.append(token)
        self.generated_tokens += 1
        if decodes:
            self.running.decoding.sync_tokens(sequence)
        scored = sampled.logprobs
        self._deliver(sequence, token, None if scored is None else scored[index])

    def _record_details(self, sequence: Sequence, index: int, sampled: ModelRunnerOutput) -> bool:
        """Errors and prompt scores of one row.  True if the row failed, which ends its request."""
        error = sampled.errors.get(index)
        if error is not None:
            # Perhaps what its pages hold is to blame: nobody else shall find them.
            self.pool.evict(sequence.pages)
            self._end(sequence, ending(sequence, "error", error=error))
            return True
        scores = sampled.prompt_logprobs[index] if sampled.prompt_logprobs else None
        if scores is not None and not sequence.first_output_sent:
            if sequence.prompt_scores is None:
                sequence.prompt_scores = [None]  # nothing comes before the first token
            sequence.prompt_scores += scores
        return False

    def _cache_pages(self, sequence: Sequence, start: int, end: int) -> None:
        """Its positions start .. end - 1 are written: perhaps they fill pages."""
        page_size = self.resolved.page_size
        # A sequence that was preempted in the meantime has no pages.
        if end % page_size < end - start and self.resolved.prefix_cache and sequence.pages:
            hashes = sequence.hash_pages(page_size)
            for index in range(start // page_size, end // page_size):
                self.pool.cache_page(sequence.pages[index], hashes[index])

    def _deliver(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """The newest token of a sequence, which may be its last."""
        output = next_output(sequence, token, logprob)
        if output.finish is None:
            self._outputs.append(output)
        else:
            self._end(sequence, output)

    def _end(self, sequence: Sequence, output: RequestOutput) -> None:
        """The one end of a request: its pages and slot are free at once, `output` is its last."""
        self._outputs.append(explained(sequence, output, self.running.mean_batch(sequence)))
        sequence.finish = output.finish
        del self._live[sequence.request_id]
        if sequence.slot < 0:
            self.waiting.mark_finished(sequence)
        else:
            self._free_slot(sequence)

    def _end_broken(self, sequence: Sequence, error: Exception) -> None:
        """Something went wrong in this request's own handling: the others go on."""
        log.error("request %d failed", sequence.request_id, exc_info=error)
        self._end(sequence, ending(sequence, "error", error=f"internal error: {error}"))

    def _free_slot(self, sequence: Sequence) -> None:
        """Out of its slot, its pages free."""
        self.running.remove_sequence(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []

    def check_integrity(self) -> None:
        """Assert that pages, slots and the lists of sequences agree.  For tests: it is slow."""
        running = self.running.all()
        self.running.check_integrity()
        self.waiting.check_integrity()
        self.pool.check_integrity([sequence.pages for sequence in running])
        assert len(running) + len(self.waiting) == len(self._live)


def _joined(columns: list[TokenColumns]) -> TokenColumns:
    if len(columns) <= 1:
        return columns[0] if columns else NOTHING
    ids, tokens, clients = zip(*columns, strict=True)
    return np.concatenate(ids), np.concatenate(tokens), np.concatenate(clients)
