"""RequestTable: all live requests, from their arrival to their last output.

They wait or have a slot; scheduler.py decides which of them run in a step.
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
from runtime.scheduler.decode_columns import EMPTY
from runtime.scheduler.outputs import (
    EngineOutputs,
    finish_output,
    next_output,
    pooled_output,
    with_request_stats,
)
from runtime.scheduler.page_pool import PagePool
from runtime.scheduler.running import Running
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.waiting_queue import WaitingQueue, validation_error

log = logging.getLogger("wavefill.requests")

NO_TOKEN = (
    "no token is left to choose from: `allowed_token_ids` or the response format allows only "
    "tokens that end the answer, which `min_tokens` forbids: allow other tokens, or lower "
    "`min_tokens`"
)
# Request ids, one token for each, and their API processes.
TokenColumns = tuple[Int64Array, NDArray[np.int32], Int64Array]
NO_TOKEN_COLUMNS: TokenColumns = (EMPTY, EMPTY.astype(np.int32), EMPTY)


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
        """No request is live and take_outputs() has returned every output."""
        return not self._live and not self._outputs and not self._token_columns

    def take_outputs(self) -> EngineOutputs:
        """The outputs made since the last call."""
        engine_outputs = EngineOutputs(*_joined(self._token_columns), self._outputs)
        self._token_columns, self._outputs = [], []
        return engine_outputs

    # Adding and finishing requests.

    def add(self, request: EngineRequest) -> None:
        """Queue a request; one that can never run is answered with an error instead."""
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
            arrival_index=self._arrivals,
            max_model_len=self.resolved.max_model_len,
        )
        self._arrivals += 1
        self._live[request.id] = sequence
        self.waiting.push(sequence)

    def abort(self, request_id: int) -> None:
        """Finish a request, waiting or running; no output if it has finished already."""
        self.finish_request(request_id, "abort")

    def finish_request(
        self,
        request_id: int,
        finish: FinishReason,
        *,
        error: str | None = None,
        is_request_error: bool = False,
    ) -> None:
        """Finish a request without a new token.  See RequestOutput for the fields."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            output = finish_output(sequence, finish, error=error)
            self._finish(sequence, structs.replace(output, is_request_error=is_request_error))

    # Committing the results of a step.

    def commit(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """Commit the results of a step; the next one may have been scheduled already."""
        batch = scheduler_output.batch
        irregular_rows: list[int] = []
        if batch.decode_rows:
            irregular_rows = self._commit_plain_rows(scheduler_output, model_output)
        for row, sequence in self._live_rows(scheduler_output, irregular_rows):
            if sequence.slot < 0 and batch.sample[row]:
                sequence.unread_tokens -= 1
            try:
                self._commit_row(sequence, row, batch, model_output)
            except Exception as error:
                self._finish_failed(sequence, error)

    def sampling_rows(
        self, scheduler_output: SchedulerOutput, request_ids: Container[int]
    ) -> list[tuple[int, int]]:
        """(row, request id) of the rows that sample for the live ones of `request_ids`."""
        ids = scheduler_output.decoding.requests.ids.tolist()
        decoding = [row for row, id in enumerate(ids) if id in request_ids]
        live = self._live_rows(scheduler_output, decoding)
        return [
            (row, sequence.request_id)
            for row, sequence in live
            if sequence.request_id in request_ids and scheduler_output.batch.sample[row]
        ]

    def _live_rows(
        self, scheduler_output: SchedulerOutput, rows: Iterable[int]
    ) -> Iterator[tuple[int, Sequence]]:
        """Those of some decode rows and of all prefill rows whose requests are live."""
        requests = scheduler_output.decoding.requests
        for row in rows:
            sequence = self._live.get(int(requests.ids[row]))
            if sequence is not None and sequence.arrival_index == requests.arrival_index[row]:
                yield row, sequence
        decode_rows = scheduler_output.batch.decode_rows
        for row, sequence in enumerate(scheduler_output.prefilling, decode_rows):
            if sequence.finish is None:
                yield row, sequence

    def _commit_plain_rows(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[int]:
        """Commit the decode rows that have nothing but a token; returns the irregular rows.

        Most rows of most steps are plain: at 256 rows this is most of the host time of a step.
        """
        rows = scheduler_output.decoding
        requests, tokens = rows.requests, model_output.tokens[: len(rows.starts)]
        irregular = model_output.irregular_rows() + scheduler_output.held_rows
        full, irregular_rows = self.running.decoding.commit(
            rows, tokens, [row for row in irregular if row < len(tokens)]
        )
        for sequence, content in full:
            try:
                self._cache_page(sequence, content)
            except Exception as error:
                self._finish_failed(sequence, error)
        ids, clients = requests.ids, requests.clients
        if irregular_rows:
            plain = np.ones(len(ids), dtype=np.bool_)
            plain[irregular_rows] = False
            ids, clients, tokens = ids[plain], clients[plain], tokens[plain]
        self.generated_tokens += len(ids)
        self._token_columns.append((ids, tokens, clients))
        return irregular_rows

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
        self, sequence: Sequence, row: int, batch: Batch, model_output: ModelRunnerOutput
    ) -> None:
        """Commit a prefill row or an irregular decode row of a live sequence."""
        if self._record_details(sequence, row, model_output):
            return
        decodes = self.running.decoding.has(sequence)
        if decodes:
            self.running.decoding.flush_tokens(sequence)
        start = int(batch.starts[row])
        self._cache_pages(sequence, start, start + int(batch.q_lens[row]))
        if not batch.sample[row]:
            if row in model_output.embeddings:
                self._finish(sequence, pooled_output(sequence, model_output.embeddings[row]))
            return
        token = int(model_output.tokens[row])
        if token == LAST:
            self.finish_request(sequence.request_id, "error", error=NO_TOKEN, is_request_error=True)
            return
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"the executor sampled {token}, not a token id of the model")
        sequence.tokens.append(token)
        self.generated_tokens += 1
        if decodes:
            self.running.decoding.sync_tokens(sequence)
        scored = model_output.logprobs
        self._deliver(sequence, token, None if scored is None else scored[row])

    def _record_details(
        self, sequence: Sequence, row: int, model_output: ModelRunnerOutput
    ) -> bool:
        """Record a row's prompt logprobs.  True if the row failed, which finishes its request."""
        error = model_output.errors.get(row)
        if error is not None:
            # The cause may be the content of its pages: no other request may hit them.
            self.pool.evict(sequence.pages)
            self._finish(sequence, finish_output(sequence, "error", error=error))
            return True
        scores = model_output.prompt_logprobs[row] if model_output.prompt_logprobs else None
        if scores is not None and not sequence.first_output_sent:
            if sequence.prompt_scores is None:
                sequence.prompt_scores = [None]  # the first token has no logprob
            sequence.prompt_scores += scores
        return False

    def _cache_pages(self, sequence: Sequence, start: int, end: int) -> None:
        """Cache the pages that positions start .. end - 1, just written, have filled."""
        page_size = self.resolved.page_size
        # A sequence that was preempted in the meantime has no pages.
        if end % page_size < end - start and self.resolved.prefix_cache and sequence.pages:
            hashes = sequence.hash_pages(page_size)
            for index in range(start // page_size, end // page_size):
                self.pool.cache_page(sequence.pages[index], hashes[index])

    def _deliver(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """Output the newest token of a sequence, which may be its last."""
        output = next_output(sequence, token, logprob)
        if output.finish is None:
            self._outputs.append(output)
        else:
            self._finish(sequence, output)

    def _finish(self, sequence: Sequence, output: RequestOutput) -> None:
        """Finish a request: `output` is its last, its pages and slot are free at once."""
        self._outputs.append(
            with_request_stats(sequence, output, self.running.mean_batch(sequence))
        )
        sequence.finish = output.finish
        del self._live[sequence.request_id]
        if sequence.slot < 0:
            self.waiting.mark_finished(sequence)
        else:
            self._free_slot(sequence)

    def _finish_failed(self, sequence: Sequence, error: Exception) -> None:
        """Finish one request after an exception in its own handling: the others continue."""
        log.error("request %d failed", sequence.request_id, exc_info=error)
        self._finish(sequence, finish_output(sequence, "error", error=f"internal error: {error}"))

    def _free_slot(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a running sequence."""
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
        return columns[0] if columns else NO_TOKEN_COLUMNS
    ids, tokens, clients = zip(*columns, strict=True)
    return np.concatenate(ids), np.concatenate(tokens), np.concatenate(clients)
