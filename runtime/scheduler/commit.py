"""Committer: the results of a step become tokens of its sequences, and outputs.

Most rows of most steps have nothing but tokens: they are committed as whole columns.  The others
are taken one by one, from their first token that is not plain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.config import MAX_SEQS
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
    """One token for each of `ids`, which names a request once for each of its tokens, in order."""

    ids: Int64Array
    tokens: NDArray[np.int32]
    clients: Int64Array  # index of the API process of each


INDICES: Int64Array = np.arange(MAX_SEQS)  # never written to
NO_TOKEN_COLUMNS = TokenColumns(EMPTY, EMPTY.astype(np.int32), EMPTY)


class Committer:
    def __init__(self, requests: RequestTable) -> None:
        self.generated_tokens = 0
        self._requests = requests
        self._kv_pages, self._pool = requests.kv_pages, requests.pool
        self._has_windows = requests.kv_pages.capacity.has_windows
        self._page_size = requests.resolved.page_size
        self._prefix_cache = requests.resolved.prefix_cache

    def commit(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> TokenColumns:
        """Commit the results of a step; the next one may have been scheduled already.

        Returns the tokens of plain rows; the outputs of the others are in RequestTable.outputs.
        """
        self._requests.num_commits += 1
        columns = NO_TOKEN_COLUMNS
        first_columns: dict[int, int] = {}
        if scheduler_output.batch.decode_rows:
            columns, first_columns = self._commit_plain_rows(scheduler_output, model_output)
        for row, sequence in scheduler_output.live_rows(self._requests.live, first_columns):
            sequence.has_unread_row = False
            try:
                self._commit_row(
                    sequence, row, scheduler_output.batch, model_output, first_columns.get(row, 0)
                )
            except Exception as error:
                self._requests.finish_failed(sequence, error)
        if self._requests.snapshots.unread:
            failed = [int(scheduler_output.batch.slots[row]) for row in model_output.errors]
            self._requests.snapshots.read(self._requests.num_commits, failed, self._pool)
        return columns

    def _commit_plain_rows(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> tuple[TokenColumns, dict[int, int]]:
        """Commit the decode rows that have nothing but tokens, column by column of their tokens.

        Returns the other rows, too, each with the first column that is left to _commit_row().  At
        256 rows this is most of the host time of a step.
        """
        rows, decoding = scheduler_output.decoding, self._requests.decoding
        requests, count = rows.requests, len(rows.starts)
        tokens = model_output.tokens[:count]
        held = [row for row in scheduler_output.held_rows if row < count]
        irregular = [row for row in _rows_with_details(model_output) if row < count] + held
        known = rows.starts + 1
        if tokens.shape[1] > 1:
            decoding.subtract_refused(rows, tokens, held)
            known = decoding.known[rows.slots]
        committed: list[TokenColumns] = []
        first_columns: dict[int, int] = {}
        indices = INDICES[:count]  # of the rows that are plain so far
        for column in range(tokens.shape[1]):
            newest = tokens[indices, column] if column else tokens[:, 0]
            if column:
                accepted = newest != LAST
                indices, newest, known = indices[accepted], newest[accepted], known[accepted] + 1
                requests = rows.requests.take(indices)
            full, irregular = decoding.commit(requests, known, newest, irregular)
            for sequence, content in full:
                try:
                    self._cache_page(sequence, content)
                    if self._has_windows:
                        self._release_behind_window(sequence, len(sequence.tokens))
                except Exception as error:
                    self._requests.finish_failed(sequence, error)
            if irregular:
                first_columns.update(dict.fromkeys(indices[irregular].tolist(), column))
                plain = np.ones(len(indices), dtype=np.bool_)
                plain[irregular] = False
                indices, newest, known = indices[plain], newest[plain], known[plain]
                requests, irregular = requests.take(plain), []
            committed.append(TokenColumns(requests.ids, newest, requests.clients))
            self.generated_tokens += len(newest)
        if len(committed) == 1:
            return committed[0], first_columns
        return TokenColumns(*map(np.concatenate, zip(*committed, strict=True))), first_columns

    def _cache_page(self, sequence: Sequence, content: bytes) -> None:
        if not self._prefix_cache:
            return
        if sequence.hash_page(content, self._page_size):
            self._kv_pages.cache_page(sequence, len(sequence.hashes) - 1)
        else:
            written = len(sequence.tokens)
            self._cache_pages(sequence, written - 1, written)

    def _cache_pages(self, sequence: Sequence, start: int, end: int) -> None:
        """Cache the pages that positions start .. end - 1, just written, have filled."""
        page_size = self._page_size
        # A sequence that was preempted in the meantime has no pages.
        if end % page_size < end - start and self._prefix_cache and sequence.slot >= 0:
            sequence.hash_pages(page_size)
            for index in range(start // page_size, end // page_size):
                self._kv_pages.cache_page(sequence, index)

    def _release_behind_window(self, sequence: Sequence, known: int) -> None:
        """Free the pages that no query sees once `known` tokens are.

        The newest of these may be computed again, by a row whose mask was late.
        """
        if sequence.slot >= 0:
            self._kv_pages.release_behind_window(sequence, known - 1)

    def _commit_row(
        self,
        sequence: Sequence,
        row: int,
        batch: Batch,
        model_output: ModelRunnerOutput,
        first_column: int,
    ) -> None:
        """Commit a prefill row, or the tokens of a decode row from `first_column` on."""
        requests = self._requests
        if self._record_details(sequence, row, model_output):
            return
        decodes = requests.decoding.has(sequence)
        if decodes:
            requests.decoding.flush_tokens(sequence)
        start, end = len(sequence.tokens) - 1, len(sequence.tokens)
        if row >= batch.decode_rows:
            start, end = int(batch.starts[row]), int(batch.starts[row] + batch.q_lens[row])
        self._cache_pages(sequence, start, end)
        self._requests.snapshots.publish(sequence, end)
        if self._has_windows:
            self._release_behind_window(sequence, end)
        if not batch.sample[row]:
            if row in model_output.embeddings:
                embedding = model_output.embeddings[row]
                output = RequestOutput(sequence.request_id, [], "stop", embedding=embedding)
                requests.finish(sequence, as_first_output(sequence, output))
            return
        tokens = model_output.sampled(row)[first_column:]
        if not tokens:
            requests.finish_request(
                sequence.request_id, "error", error=NO_TOKEN, is_request_error=True
            )
            return
        logprobs = None if model_output.logprobs is None else model_output.logprobs[row]
        known = len(sequence.tokens)
        output = self._append(sequence, tokens, logprobs)
        self.generated_tokens += len(output.tokens)
        # The last of them has no KV yet.
        self._cache_pages(sequence, known, len(sequence.tokens) - 1)
        if decodes:
            requests.decoding.sync_tokens(sequence)
        if output.finish is None:
            requests.outputs.append(output)
        else:
            requests.finish(sequence, output)

    def _append(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob] | None
    ) -> RequestOutput:
        """Append tokens up to the one that ends the sequence; returns the output for them."""
        finish: FinishReason | None = None
        stop_id: int | None = None
        known = len(sequence.tokens)
        for token in tokens:
            if not 0 <= token < self._requests.vocab_size:
                raise ValueError(f"the executor sampled {token}, not a token id of the model")
            sequence.tokens.append(token)
            finish, stop_id = _end(sequence, token)
            if finish is not None:
                break
        tokens = sequence.tokens[known:]
        logprobs = None if logprobs is None else logprobs[: len(tokens)]
        output = RequestOutput(sequence.request_id, tokens, finish, stop_id, logprobs)
        if sequence.first_output_sent:
            return output
        return as_first_output(sequence, output, _prompt_logprobs(sequence))

    def _record_details(
        self, sequence: Sequence, row: int, model_output: ModelRunnerOutput
    ) -> bool:
        """Record a row's prompt logprobs.  True if the row failed, which finishes its request."""
        error = model_output.errors.get(row)
        if error is not None:
            # The cause may be the content of its pages or of a snapshot: no other request may hit
            # them.  A sequence that was preempted has no pages, but others may find those it had.
            self._kv_pages.evict(sequence)
            self._requests.snapshots.distrust(sequence)
            self._requests.finish(sequence, finish_output(sequence, "error", error=error))
            return True
        scores = model_output.prompt_logprobs[row] if model_output.prompt_logprobs else None
        if scores is not None and not sequence.first_output_sent:
            if sequence.prompt_scores is None:
                sequence.prompt_scores = [None]  # the first token has no logprob
            sequence.prompt_scores += scores
        return False


def _rows_with_details(model_output: ModelRunnerOutput) -> list[int]:
    """Rows with an error, or with logprobs of their tokens; embeddings do not count."""
    rows = list(model_output.errors)
    for column in (model_output.logprobs, model_output.prompt_logprobs):
        if column is not None:
            rows += [row for row, found in enumerate(column) if found is not None]
    return rows


def _end(sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
    """Whether a sequence ends with `token`, its newest, and the id that ended it."""
    min_tokens = sequence.request.params.min_tokens
    if token in sequence.stop_ids and len(sequence.tokens) - sequence.prompt_len > min_tokens:
        return "stop", token
    return ("length" if len(sequence.tokens) >= sequence.max_len else None), None


def _prompt_logprobs(sequence: Sequence) -> list[TokenLogprob | None] | None:
    """One entry a prompt token, None for the first; None if they were not requested."""
    if sequence.request.params.prompt_logprobs is None:
        return None
    # A prompt of one token has no token to score, so the executor reported none.
    scores = sequence.prompt_scores or [None]
    if len(scores) != sequence.prompt_len:
        raise ValueError(f"{len(scores)} of {sequence.prompt_len} prompt tokens were scored")
    return scores
