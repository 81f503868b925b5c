"""How other servers order the same work: schedulers with vLLM's and SGLang's default policies.

They run on Wavefill's request table, pages and simulated device, so that only the policy differs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from runtime.scheduler.decode_columns import NO_DECODE_ROWS
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.scheduler import BatchBuilder, Scheduler
from runtime.scheduler.sequence import Sequence


class VllmScheduler(Scheduler):
    """Decode rows first, then prompts in the order of their arrival, up to a fixed budget."""

    def _schedule_prefills(self, builder: BatchBuilder, waiting: list[Sequence]) -> None:
        prefilling = self.requests.prefilling.values()
        budget = self.requests.resolved.max_batched_tokens - builder.decoding.num_tokens
        for sequence in sorted(chain(prefilling, waiting), key=lambda one: one.priority_key):
            if budget <= 0 or (sequence.slot < 0 and not self.admission.try_admit(sequence)):
                return
            count = min(sequence.num_new_tokens, budget)
            budget -= count
            if builder.add_prefill(sequence, count):
                self.requests.start_decoding(sequence)


class SglangScheduler(VllmScheduler):
    """Steps of prompts alone while there are any with room, then steps that only decode."""

    def _step(self, background_preempted: bool, stuck: bool = False) -> BatchBuilder:
        requests = self.requests
        waiting = self.admission.candidates(background_preempted)
        builder = BatchBuilder(NO_DECODE_ROWS, requests.resolved.page_size)
        if waiting or requests.prefilling:
            self._schedule_prefills(builder, waiting)
        if not builder.num_rows:
            return super()._step(background_preempted, stuck)
        requests.num_steps += 1
        requests.num_rows += builder.num_rows
        return builder


POLICIES: dict[str, Callable[[RequestTable], Scheduler]] = {
    "wavefill": Scheduler,
    "vllm": VllmScheduler,
    "sglang": SglangScheduler,
}
