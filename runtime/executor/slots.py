"""Slots: the page tables and the newest token of each running sequence, on the device.

A sequence moves into a slot with its first row and stays until it ends or is preempted; the next
one resets the slot.  A step can use what is on the device before the host knows it.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.executor.transfers import upload
from runtime.scheduler.batch import Batch, Int64Array


class SlotTables:
    """page_tables [groups, slots, max_pages] int32, last_token [slots] int64."""

    def __init__(
        self, num_slots: int, max_pages: int, device: torch.device, num_groups: int = 1
    ) -> None:
        """num_groups: of layers that share a page table (attention/kv_groups.py)."""
        self.device = device
        shape = num_groups, num_slots, max_pages
        self.page_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._num_pages = np.zeros(num_slots, dtype=np.int64)

    def count_pages(self, batch: Batch) -> Int64Array:
        """Count the batch's new pages.  Returns how many each row's slot had before, [B].

        They are as many in each group.  The caller writes the new ones to `page_tables`.
        """
        for row in batch.new_rows:
            self._num_pages[row.slot] = 0
        pages_before = self._num_pages[batch.slots]
        if len(batch.new_pages):
            self._num_pages[batch.slots] = pages_before + batch.num_new_pages
        return pages_before

    def append_pages(self, batch: Batch, pages_before: Int64Array) -> None:
        """Append the new pages to those that each row's slot had."""
        if not len(batch.new_pages):
            return
        added = batch.num_new_pages
        before = np.cumsum(added) - added
        pages = batch.new_pages.reshape(-1, len(self.page_tables)).T  # [groups, sum(added)]
        columns = np.arange(pages.shape[1]) + np.repeat(pages_before - before, added)
        rows = np.repeat(batch.slots, added)
        slots, columns_on_device, *of_groups = upload(
            np.stack([rows, columns, *pages]), self.device
        ).unbind()
        for table, group_pages in zip(self.page_tables, of_groups, strict=True):
            table[slots, columns_on_device] = group_pages.to(torch.int32)
