"""Committer: the results of a step become tokens of its sequences, and outputs.

Most rows of most steps have nothing but a token: they are committed as whole columns.  The others
are taken one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.messages import FinishReason, RequestOutput, TokenLogprob
from runtime.scheduler.batch import LAST, Batch, Int64Array, ModelRunnerOutput
from runtime.scheduler.decode_columns import EMPTY
from runtime.scheduler.request_table import RequestTable, as_first_output, finish_output
from runtime.scheduler.scheduler import SchedulerOutput
from runtime.scheduler.sequence import Sequence

NO_TOKEN = (
    "no token is left to choose from: `allowed_token_ids` or the response format allows only "
    "tokens that end the answer, which `min_tokens` forbids: allow other tokens, or lower "
    "`min_tokens`"
)


class TokenColumns(NamedTuple):
    """One token for each of `ids`, and nothing else to say of these requests."""

    ids: Int64Array
    tokens: NDArray[np.int32]
    clients: Int64Array  # index of the API process of each


NO_TOKEN_COLUMNS = TokenColumns(EMPTY, EMPTY.astype(np.int32), EMPTY)


class Committer:
    def __init__(self, requests: RequestTable) -> None:
        self.generated_tokens = 0
        self._requests = requests

    def commit(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> TokenColumns:
        """Commit the results of a step; the next one may have been scheduled already.

        Returns the tokens of plain rows; the outputs of the others are in RequestTable.outputs.
        """
        batch, columns = scheduler_output.batch, NO_TOKEN_COLUMNS
        irregular_rows: list[int] = []
        if batch.decode_rows:
            columns, irregular_rows = self._commit_plain_rows(scheduler_output, model_output)
        for row, sequence in scheduler_output.live_rows(self._requests.live, irregular_rows):
            if sequence.slot < 0 and batch.sample[row]:
                sequence.unread_tokens -= 1
            try:
                self._commit_row(sequence, row, batch, model_output)
            except Exception as error:
                self._requests.finish_failed(sequence, error)
        return columns

    def _commit_plain_rows(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> tuple[TokenColumns, list[int]]:
        """Commit the decode rows that have nothing but a token; returns the irregular rows, too.

        At 256 rows this is most of the host time of a step.
        """
        rows = scheduler_output.decoding
        requests, tokens = rows.requests, model_output.tokens[: len(rows.starts)]
        irregular = _rows_with_details(model_output) + scheduler_output.held_rows
        full, irregular_rows = self._requests.decoding.commit(
            rows, tokens, [row for row in irregular if row < len(tokens)]
        )
        for sequence, content in full:
            try:
                self._cache_page(sequence, content)
            except Exception as error:
                self._requests.finish_failed(sequence, error)
        ids, clients = requests.ids, requests.clients
        if irregular_rows:
            plain = np.ones(len(ids), dtype=np.bool_)
            plain[irregular_rows] = False
            ids, clients, tokens = ids[plain], clients[plain], tokens[plain]
        self.generated_tokens += len(ids)
        return TokenColumns(ids, tokens, clients), irregular_rows

    def _cache_page(self, sequence: Sequence, content: bytes) -> None:
        resolved = self._requests.resolved
        if not resolved.prefix_cache:
            return
        if sequence.hash_page(content, resolved.page_size):
            hashes = sequence.hashes
            self._requests.pool.cache_page(sequence.pages[len(hashes) - 1], hashes[-1])
        else:
            written = len(sequence.tokens)
            self._cache_pages(sequence, written - 1, written)

    def _cache_pages(self, sequence: Sequence, start: int, end: int) -> None:
        """Cache the pages that positions start .. end - 1, just written, have filled."""
        resolved = self._requests.resolved
        page_size = resolved.page_size
        # A sequence that was preempted in the meantime has no pages.
        if end % page_size < end - start and resolved.prefix_cache and sequence.pages:
            hashes = sequence.hash_pages(page_size)
            for index in range(start // page_size, end // page_size):
                self._requests.pool.cache_page(sequence.pages[index], hashes[index])

    def _commit_row(
        self, sequence: Sequence, row: int, batch: Batch, model_output: ModelRunnerOutput
    ) -> None:
        """Commit a prefill row or an irregular decode row of a live sequence."""
        requests = self._requests
        if self._record_details(sequence, row, model_output):
            return
        decodes = requests.decoding.has(sequence)
        if decodes:
            requests.decoding.flush_tokens(sequence)
        start = int(batch.starts[row])
        self._cache_pages(sequence, start, start + int(batch.q_lens[row]))
        if not batch.sample[row]:
            if row in model_output.embeddings:
                requests.finish(sequence, _pooled_output(sequence, model_output.embeddings[row]))
            return
        token = int(model_output.tokens[row])
        if token == LAST:
            requests.finish_request(
                sequence.request_id, "error", error=NO_TOKEN, is_request_error=True
            )
            return
        if not 0 <= token < requests.vocab_size:
            raise ValueError(f"the executor sampled {token}, not a token id of the model")
        sequence.tokens.append(token)
        self.generated_tokens += 1
        if decodes:
            requests.decoding.sync_tokens(sequence)
        scored = model_output.logprobs
        output = next_output(sequence, token, None if scored is None else scored[row])
        if output.finish is None:
            requests.outputs.append(output)
        else:
            requests.finish(sequence, output)

    def _record_details(
        self, sequence: Sequence, row: int, model_output: ModelRunnerOutput
    ) -> bool:
        """Record a row's prompt logprobs.  True if the row failed, which finishes its request."""
        error = model_output.errors.get(row)
        if error is not None:
            # The cause may be the content of its pages: no other request may hit them.
            self._requests.pool.evict(sequence.pages)
            self._requests.finish(sequence, finish_output(sequence, "error", error=error))
            return True
        scores = model_output.prompt_logprobs[row] if model_output.prompt_logprobs else None
        if scores is not None and not sequence.first_output_sent:
            if sequence.prompt_scores is None:
                sequence.prompt_scores = [None]  # the first token has no logprob
            sequence.prompt_scores += scores
        return False


def _rows_with_details(model_output: ModelRunnerOutput) -> list[int]:
    """Rows with an error or logprobs beside their token; embeddings do not count."""
    rows = list(model_output.errors)
    for column in (model_output.logprobs, model_output.prompt_logprobs):
        if column is not None:
            rows += [row for row, found in enumerate(column) if found is not None]
    return rows


def next_output(sequence: Sequence, token: int, logprob: TokenLogprob | None) -> RequestOutput:
    """The output for `token`, just appended to the sequence; `finish` is set if it ends there."""
    finish: FinishReason | None = None
    stop_id: int | None = None
    min_tokens = sequence.request.params.min_tokens
    if token in sequence.stop_ids and len(sequence.tokens) - sequence.prompt_len > min_tokens:
        finish, stop_id = "stop", token
    elif len(sequence.tokens) >= sequence.max_len:
        finish = "length"
    logprobs = None if logprob is None else [logprob]
    output = RequestOutput(sequence.request_id, [token], finish, stop_id, logprobs)
    if sequence.first_output_sent:
        return output
    return as_first_output(sequence, output, _prompt_logprobs(sequence))


def _pooled_output(sequence: Sequence, embedding: bytes) -> RequestOutput:
    """The only output of a sequence whose prompt is pooled."""
    output = RequestOutput(sequence.request_id, [], "stop", embedding=embedding)
    return as_first_output(sequence, output)


def _prompt_logprobs(sequence: Sequence) -> list[TokenLogprob | None] | None:
    """One entry a prompt token, None for the first; None if they were not asked for."""
    if sequence.request.params.prompt_logprobs is None:
        return None
    # A prompt of one token has no token to score, so the executor reported none.
    scores = sequence.prompt_scores or [None]
    if len(scores) != sequence.prompt_len:
        raise ValueError(f"{len(scores)} of {sequence.prompt_len} prompt tokens were scored")
    return scores
