"""RequestTable: all live requests, from their arrival to their last output.

It is the one owner of the sequences, the slots and the pages: a sequence waits, prefills or
decodes, and its tokens are computed by whatever scheduler.py chooses and committed by commit.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from msgspec import structs

from runtime.config import ResolvedConfig
from runtime.messages import BACKGROUND, EngineRequest, FinishReason, RequestOutput, TokenLogprob
from runtime.scheduler.chunked_prefill import RequestMix
from runtime.scheduler.decode_columns import DecodeColumns
from runtime.scheduler.images.features import ImageFeatures
from runtime.scheduler.kv_cache.kv_pages import Claim, KVPages
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.states.snapshots import StateSnapshots
from runtime.scheduler.states.state_slots import StateSlots
from runtime.scheduler.waiting_queue import WaitingQueue, validation_error

log = logging.getLogger("wavefill.requests")


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
        self.clock = clock
        self.snapshots = StateSnapshots(resolved)
        self.kv_pages = KVPages(resolved, self.snapshots)
        self.pool = self.kv_pages.pool
        self.mix = RequestMix()
        self.live: dict[int, Sequence] = {}  # by request id: those that wait or have a slot
        self.waiting = WaitingQueue()
        # By request id: tokens are left to schedule.  Some of them are held.
        self.prefilling: dict[int, Sequence] = {}
        self.decoding = DecodeColumns(resolved, vocab_size)
        self.images = ImageFeatures(resolved)
        self.states = StateSlots(resolved.max_num_seqs, resolved.num_states)
        self.num_background = 0  # sequences of priority BACKGROUND that have a slot
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_rows = 0  # of all steps
        self.num_commits = 0  # steps whose results have been read
        self.outputs: list[RequestOutput] = []  # not delivered yet
        self._free_slots = list(range(resolved.max_num_seqs - 1, -1, -1))
        self._arrivals = 0
        self._next_seed = next_seed

    # Adding and finishing requests.

    def add(self, request: EngineRequest) -> None:
        """Queue a request; one that can never run is answered with an error instead."""
        if request.id in self.live:
            raise ValueError(f"request id {request.id} is in use: ids must be unique")
        error = validation_error(request, self.resolved, self.vocab_size)
        if error is not None:
            self.outputs.append(RequestOutput(request.id, [], finish="error", error=error))
            return
        seed = request.params.seed
        sequence = Sequence(
            request,
            seed=self._next_seed() if seed is None else seed,
            arrival_index=self._arrivals,
            max_model_len=self.resolved.max_model_len,
        )
        self._arrivals += 1
        self.live[request.id] = sequence
        self.waiting.push(sequence)

    def finish_request(
        self,
        request_id: int,
        finish: FinishReason,
        *,
        error: str | None = None,
        is_request_error: bool = False,
    ) -> None:
        """Finish a request, waiting or running, without a new token; an unknown id is ignored.

        See RequestOutput for the fields.
        """
        sequence = self.live.get(request_id)
        if sequence is not None:
            output = finish_output(sequence, finish, error=error)
            self.finish(sequence, structs.replace(output, is_request_error=is_request_error))

    def finish(self, sequence: Sequence, output: RequestOutput) -> None:
        """Finish a request: `output` is its last, its pages and slot are free at once."""
        # Of the steps since it was first admitted.
        steps, rows = sequence.steps_at_admission or (self.num_steps, self.num_rows)
        mean_batch = (self.num_rows - rows) / max(1, self.num_steps - steps)
        self.outputs.append(
            structs.replace(
                output,
                preemptions=sequence.preemptions,
                mean_batch=mean_batch,
                events=sequence.events,
            )
        )
        if self.decoding.has(sequence):
            self.decoding.flush_tokens(sequence)
        if sequence.steps_at_admission is not None:
            generated = len(sequence.tokens) - sequence.prompt_len
            encoder = sequence.num_encoder_tokens
            self.mix.record(sequence.prompt_len, sequence.num_cached_tokens, generated, encoder)
        sequence.finish = output.finish
        del self.live[sequence.request_id]
        if sequence.slot < 0:
            self.waiting.mark_finished(sequence)
        else:
            if output.finish in ("stop", "length"):
                self._keep_state(sequence)
            self._free_slot(sequence)

    def finish_failed(self, sequence: Sequence, error: Exception) -> None:
        """Finish one request after an exception in its own handling: the others continue."""
        log.error("request %d failed", sequence.request_id, exc_info=error)
        self.finish(sequence, finish_output(sequence, "error", error=f"internal error: {error}"))

    # Sequences with a slot.

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding.slots)

    @property
    def pages_soon(self) -> int:
        """Pages that the running sequences may need in the next step, for a row each."""
        pages = self.kv_pages.capacity.pages_of(self.resolved.max_tokens_per_row)
        return self.num_running * pages * self.kv_pages.num_groups

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step has been scheduled whose results have not been read."""
        return self.num_steps > self.num_commits

    @property
    def full(self) -> bool:
        """Whether every slot is taken, or every recurrent state."""
        return not self.num_free_slots

    @property
    def num_free_slots(self) -> int:
        """How many more sequences could run, however few pages there are."""
        free = len(self._free_slots)
        return self.states.room(free) if self.states.num_states else free

    def running(self) -> list[Sequence]:
        return [*self.decoding.all(), *self.prefilling.values()]

    def admit(self, sequence: Sequence, claim: Claim) -> None:
        """Move a sequence of the queue's front into a free slot, with the pages it has claimed."""
        self.waiting.remove(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.needs_slot_init = True
        self.kv_pages.take(sequence, claim)
        self.states.take(sequence)
        sequence.snapshot_at = 0
        if claim.snapshot is not None:
            self.snapshots.load(claim.snapshot, self.states.of(sequence), sequence)
        if sequence.steps_at_admission is None:
            sequence.steps_at_admission = (self.num_steps, self.num_rows)
        self.prefilling[sequence.request_id] = sequence
        self.num_background += sequence.request.priority >= BACKGROUND

    def start_decoding(self, sequence: Sequence) -> None:
        """All its known tokens are scheduled: from now on it decodes."""
        del self.prefilling[sequence.request_id]
        self.kv_pages.end_prefill(sequence)
        self.decoding.add_sequence(sequence)
        self._count_row(sequence, 1)

    def _stop_decoding(self, sequence: Sequence) -> None:
        self.decoding.remove_sequence(sequence)
        self._count_row(sequence, -1)

    def _count_row(self, sequence: Sequence, sign: int) -> None:
        cached, encoder = sequence.num_cached_tokens, sequence.num_encoder_tokens
        self.mix.count_row(sequence.prompt_len, cached, sign, encoder)

    def preempt(self, sequence: Sequence) -> None:
        """Free its slot and pages; it waits at its old priority and is recomputed later.

        What of them is found again then, as of any prefix, is not computed again.
        """
        self._keep_state(sequence)
        self._free_slot(sequence)
        sequence.num_computed_tokens = 0
        sequence.preemptions += 1
        sequence.note_event(self.clock(), 0)
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def hold(self, sequence: Sequence, start: int) -> None:
        """Hold a decoding sequence left out of a step: it keeps its slot and pages, without rows.

        The token that the device sampled for it is void, so its newest known token is computed
        again when it resumes; in a model with recurrent states, all tokens of the row, which began
        at position `start`.
        """
        self._stop_decoding(sequence)
        self.states.undo(sequence)
        sequence.has_unread_row = False
        newest = len(sequence.tokens) - 1
        sequence.num_computed_tokens = start if self.states.num_states else newest
        sequence.needs_slot_init = True
        sequence.held_since = self.clock()
        self.prefilling[sequence.request_id] = sequence

    def resume_held(self, request_id: int) -> None:
        """A held request, if it is still live, may have rows again."""
        sequence = self.live.get(request_id)
        if sequence is not None and sequence.held_since is not None:
            sequence.held_since = None
            if sequence.slot < 0:
                self.waiting.push(sequence)

    def longest_held(self, since: float = math.inf) -> Sequence | None:
        """The sequence that was held first, if it was held at `since` or before."""
        held = [
            (one.held_since, one.arrival_index, one)
            for one in self.prefilling.values()
            if one.held_since is not None and one.held_since <= since
        ]
        return min(held)[2] if held else None

    def lowest_priority(self) -> Sequence:
        return max(self.running(), key=lambda sequence: sequence.priority_key)

    def _keep_state(self, sequence: Sequence) -> None:
        """Take a snapshot of the state of a sequence that is about to lose it, if it decodes."""
        if self.snapshots.count and self.decoding.has(sequence):
            self.decoding.flush_tokens(sequence)
            position = self.decoding.num_computed_tokens(sequence)
            step = self.num_steps if position == len(sequence.tokens) else None
            self.snapshots.keep(sequence, self.states.of(sequence), position, self.pool, step)

    def _free_slot(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a running sequence."""
        if self.decoding.has(sequence):
            self._stop_decoding(sequence)
        else:
            del self.prefilling[sequence.request_id]
        self.num_background -= sequence.request.priority >= BACKGROUND
        self.images.give_up_unless_wanted(self.prefilling.values())
        self.states.release(sequence)
        self.snapshots.drop(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self.kv_pages.release_all(sequence)

    def check_integrity(self) -> None:
        """Assert that pages, slots and the lists of sequences agree.  For tests: it is slow."""
        running = self.running()
        assert sorted([one.slot for one in running] + self._free_slots) == list(
            range(self.resolved.max_num_seqs)
        )
        assert all(one.finish is None for one in running)
        background = [one for one in running if one.request.priority >= BACKGROUND]
        assert len(background) == self.num_background
        self.decoding.check_integrity()
        self.waiting.check_integrity()
        self.images.check_integrity()
        self.states.check_integrity(running)
        self.snapshots.check_integrity(running)
        holders = [one.pages.held() for one in running] + self.snapshots.held_pages()
        self.pool.check_integrity(holders)
        assert sum(one.pages.reserved for one in running) == self.pool.num_reserved
        assert len(running) + self.waiting.count == len(self.live)


def finish_output(
    sequence: Sequence, finish: FinishReason, *, error: str | None = None
) -> RequestOutput:
    """The last output of a sequence that ends without a new token."""
    output = RequestOutput(sequence.request_id, [], finish, error=error)
    return output if sequence.first_output_sent else as_first_output(sequence, output)


def as_first_output(
    sequence: Sequence,
    output: RequestOutput,
    prompt_logprobs: list[TokenLogprob | None] | None = None,
) -> RequestOutput:
    """The first output, with prompt logprobs, cached tokens and the time of admission."""
    sequence.first_output_sent = True
    sequence.prompt_scores = None
    return structs.replace(
        output,
        prompt_logprobs=prompt_logprobs,
        cached=sequence.num_cached_tokens,
        started=sequence.first_scheduled_at,
    )
