"""How other servers order the same work: schedulers with vLLM's and SGLang's default policies.

They run on Wavefill's request table, pages and simulated device, so that only the policy differs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from runtime.scheduler.decode_columns import NO_DECODE_ROWS, DecodeRows
from runtime.scheduler.prefill import Prefill, PrefillRows
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.sequence import Sequence


class VllmPrefill(Prefill):
    """Prompts in the order of their arrival, up to a fixed budget."""

    def _add_chunks(self, rows: PrefillRows, waiting: list[Sequence]) -> None:
        prefilling = self.requests.prefilling.values()
        budget = self.requests.resolved.max_batched_tokens - rows.decoding.num_tokens
        for sequence in sorted(chain(prefilling, waiting), key=lambda one: one.priority_key):
            if budget <= 0 or (sequence.slot < 0 and not self.admission.try_admit(sequence)):
                return
            count = min(sequence.num_new_tokens, budget)
            budget -= count
            if rows.add(sequence, count):
                self.requests.start_decoding(sequence)


class VllmScheduler(Scheduler):
    """Decode rows first, then prompts in the order of their arrival."""

    def __init__(self, requests: RequestTable) -> None:
        super().__init__(requests)
        self.prefill = VllmPrefill(requests, self.admission, self.times)


class SglangScheduler(VllmScheduler):
    """Steps of prompts alone while there are any with room, then steps that only decode."""

    def _step(
        self, background_preempted: bool, stuck: bool = False
    ) -> tuple[DecodeRows, PrefillRows | None]:
        requests = self.requests
        waiting = self.admission.candidates(background_preempted)
        if waiting or requests.prefilling:
            prefill = self.prefill.schedule(NO_DECODE_ROWS, waiting)
            if prefill.num_rows:
                requests.num_steps += 1
                requests.num_rows += prefill.num_rows
                return NO_DECODE_ROWS, prefill
        return super()._step(background_preempted, stuck)


POLICIES: dict[str, Callable[[RequestTable], Scheduler]] = {
    "wavefill": Scheduler,
    "vllm": VllmScheduler,
    "sglang": SglangScheduler,
}
