"""Executors: where batches run.  Local runs them in this process, on one device."""

from __future__ import annotations

from runtime.batch import Batch, Masks
from runtime.runner import Pending, Runner


class Local:
    """One device in this process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # A CPU has finished a step when the call returns, so nothing could overlap with it.
        self.overlap = runner.device.type == "cuda"

    def forward(self, batch: Batch) -> None:
        self._runner.forward(batch)

    def prepare(self) -> bool:
        """Use an idle moment, a tenth of a second of it.  True if there is more to do."""
        return self._runner.prepare()

    def sample(self, batch: Batch, masks: Masks | None = None) -> Pending:
        return self._runner.sample(batch, masks)
