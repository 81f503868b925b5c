"""The inputs of a padded step are those that plain torch makes of the batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from runtime.cuda_graph import buffers as buffers_module
from runtime.cuda_graph import prepare
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.buffers import HostBlock, Layout, StepBuffers
from runtime.executor.inputs import build_input
from runtime.executor.slots import SlotTables
from runtime.messages import SamplingParams
from runtime.sampling.state import ROW_WORDS, SamplerState
from runtime.scheduler.batch import LAST, Batch, NewRow, make_batch

SLOTS, MAX_PAGES, PAGE, VOCAB = 6, 9, 4, 97
JUNK = 0x5A5A5A5
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


class NewSequences:
    """Random batches that a scheduler could have made: rows go on, or their slot starts over."""

    def __init__(self, seed: int, groups: int = 1) -> None:
        self.draw, self.groups = random.Random(seed), groups
        self.length = [0] * SLOTS  # stored tokens of each slot
        self.pages = [0] * SLOTS

    def batch(self, decode: bool) -> Batch:
        draw = self.draw
        slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
        rows: list[tuple[int, int, list[int]]] = []
        new_rows: list[NewRow] = []
        for slot in slots:
            q_len = 1 if decode else draw.choice([1, 1, 2, 7, 12])
            if draw.random() < 0.3 or self.length[slot] + q_len > MAX_PAGES * PAGE:
                # What other sequences have stored is shared: the row begins behind it.
                self.length[slot] = draw.randrange(0, 12)
                self.pages[slot] = 0
                new_rows.append(NewRow(slot, PARAMS, 0, 1, []))
            needed = -(-(self.length[slot] + q_len) // PAGE)
            if draw.random() < 0.2:
                needed = draw.randint(needed, MAX_PAGES)
            added = max(needed - self.pages[slot], 0)
            rows.append((slot, q_len, [draw.randrange(1000) for _ in range(added * self.groups)]))
        rows.sort(key=lambda row: row[1] != 1)
        lengths = [self.length[slot] for slot, _, _ in rows]
        for slot, q_len, pages in rows:
            self.length[slot] += q_len
            self.pages[slot] += len(pages) // self.groups
        tokens = [
            LAST if draw.random() < 0.5 else draw.randrange(VOCAB)
            for _, q_len, _ in rows
            for _ in range(q_len)
        ]
        return make_batch(
            slots=[slot for slot, _, _ in rows],
            starts=lengths,
            q_lens=[q_len for _, q_len, _ in rows],
            tokens=tokens,
            num_new_pages=[len(pages) // self.groups for _, _, pages in rows],
            new_pages=[page for _, _, pages in rows for page in pages],
            sample=[draw.random() < 0.8 for _ in rows],
            decode_rows=sum(q_len == 1 for _, q_len, _ in rows),
            new_rows=new_rows,
        )


def padded(
    device: torch.device, bucket: Bucket, slots: SlotTables, buffers: StepBuffers, batch: Batch
):
    """Send the batch and prepare its step; everything is junk before.  Checks what the sampler
    has learnt of new sequences."""

    def junk(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, JUNK, dtype=dtype, device=device)

    groups = len(slots.page_tables)
    layout = buffers.layout(bucket)
    before = slots.count_pages(batch)
    sampler = SamplerState(SLOTS, VOCAB, device)
    sampler.rows.fill_(JUNK)
    known = sampler.rows.clone()
    new_rows = batch.new_rows[: layout.num_new_rows]
    slot_ids = np.asarray(batch.slots, dtype=np.int32)
    buffers.send(bucket, batch, before, slot_ids, new_rows, sampler)
    found = {
        "tokens": junk(bucket.tokens),
        "positions": junk(bucket.tokens),
        "slot_mappings": junk(groups, bucket.tokens),
        "logit_rows": junk(bucket.rows),
        "row_pages": junk(groups, bucket.rows, MAX_PAGES, dtype=torch.int32),
    }
    prepare.prepare(
        buffers.block, slots.page_tables, slots.last_token, sampler.rows, stride=layout.stride,
        new_rows_at=layout.new_rows_at, num_new_rows=layout.num_new_rows,
        tokens_at=layout.tokens_at, pages_at=layout.pages_at, page_size=PAGE, **found,
    )  # fmt: skip
    packed = np.zeros((len(new_rows), ROW_WORDS), dtype=np.int32)
    sampler.pack(new_rows, packed)
    for row, words in zip(new_rows, packed, strict=True):
        known[row.slot] = torch.from_numpy(words)
    assert sampler.rows.equal(known)
    for name, column, length in (
        ("cu_q", prepare.CU_Q, bucket.rows + 1),
        ("kv_lens", prepare.KV_LEN, bucket.rows),
        ("sample_slots", prepare.SAMPLE_SLOT, bucket.rows),
    ):
        found[name] = layout.column(buffers.block, column, length)
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("decode", [True, False])
def test_padded_steps_have_the_inputs_of_plain_ones(
    device: torch.device, decode: bool, groups: int
) -> None:
    sequences = NewSequences(seed=decode, groups=groups)
    slots, plain = (SlotTables(SLOTS, MAX_PAGES, device, groups) for _ in range(2))
    kv = KVPool.allocate(
        layers=1, pages=1, kv_heads=1, page_size=PAGE, head_dim=2, dtype=torch.float32,
        device=device,
    )  # fmt: skip
    buffers = StepBuffers([Bucket(96, SLOTS, False)], device, groups)
    buffers.block.fill_(JUNK)
    for table in (slots.page_tables, plain.page_tables):
        table.fill_(JUNK)
    for step in range(60):
        batch = sequences.batch(decode)
        last = torch.randint(VOCAB, (SLOTS,), generator=torch.Generator().manual_seed(step))
        slots.last_token.copy_(last)
        plain.last_token.copy_(last)
        count, total = len(batch.slots), len(batch.tokens)
        rows = sequences.draw.randint(count, SLOTS)
        tokens = rows if decode else sequences.draw.randint(total, 96)
        found = padded(device, Bucket(tokens, rows, decode), slots, buffers, batch)
        plain.append_pages(batch, plain.count_pages(batch))
        wanted = build_input(batch, plain, kv, ReferenceBackend())
        meta = wanted.meta
        padding, empty = tokens - total, rows - count
        assert found["tokens"] == wanted.tokens.tolist() + [0] * padding
        assert found["positions"] == wanted.positions.tolist() + [0] * padding
        for mapping, wanted_mapping in zip(found["slot_mappings"], meta.slot_mappings, strict=True):
            assert mapping == wanted_mapping.tolist() + [-1] * padding
        sums = meta.cu_seqlens_q.tolist()
        assert found["cu_q"] == sums + [total] * empty
        assert found["logit_rows"][:count] == [end - 1 for end in sums[1:]]
        assert all(0 <= row < tokens for row in found["logit_rows"])
        assert found["kv_lens"] == meta.cache_seqlens.tolist() + [0] * empty
        assert found["sample_slots"] == batch.slots.tolist() + [-1] * empty
        for row, length in enumerate(found["kv_lens"][:count]):
            pages = -(-length // PAGE)
            for row_pages, table in zip(found["row_pages"], meta.page_tables, strict=True):
                assert row_pages[row][:pages] == table[row, :pages].tolist()
        assert slots.page_tables.equal(plain.page_tables), "what the slots keep"


def test_step_without_rows_changes_nothing(device: torch.device) -> None:
    slots = SlotTables(SLOTS, MAX_PAGES, device)
    slots.page_tables.fill_(JUNK)
    nothing = make_batch()
    for bucket in (Bucket(4, 4, True), Bucket(16, 3, False)):
        buffers = StepBuffers([bucket], device)
        buffers.block.fill_(JUNK)
        found = padded(device, bucket, slots, buffers, nothing)
        assert found["slot_mappings"] == [[-1] * bucket.tokens]
        assert found["tokens"] == found["positions"] == [0] * bucket.tokens
        assert found["cu_q"] == [0] * (bucket.rows + 1)
        assert found["sample_slots"] == [-1] * bucket.rows
    assert (slots.page_tables == JUNK).all()


def test_rows_of_more_tokens_and_pages_than_a_program_handles_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 2 * prepare.BLOCK + 3
    pages = list(range(5, 5 + total))
    batch = make_batch([1], [0], [total], [7] * total, [total], pages, [True], 0, [])
    slots = SlotTables(2, total + 5, device)
    bucket = Bucket(total + prepare.BLOCK + 1, 2, False)
    monkeypatch.setattr(buffers_module, "EXTRA_PAGES", total)
    layout = Layout.of(bucket)
    block = torch.full((layout.packed.num_bytes // 4,), -1, dtype=torch.int32)
    sampler = SamplerState(2, VOCAB, device)
    host_block = HostBlock(block.view(torch.uint8), layout)
    host_block.fill(batch, np.zeros(1, np.int32), np.ones(1, np.int32))
    tokens, positions, slot_mapping = torch.zeros(
        3, bucket.tokens, dtype=torch.int64, device=device
    )
    row_pages = torch.zeros(2, total + 5, dtype=torch.int32, device=device)
    prepare.prepare(
        block.to(device), slots.page_tables, slots.last_token, sampler.rows, stride=layout.stride,
        new_rows_at=layout.new_rows_at, num_new_rows=layout.num_new_rows,
        tokens_at=layout.tokens_at, pages_at=layout.pages_at, tokens=tokens, positions=positions,
        slot_mappings=slot_mapping[None],
        logit_rows=torch.zeros(2, dtype=torch.int64, device=device),
        row_pages=row_pages[None], page_size=1,
    )  # fmt: skip
    assert positions.tolist() == [*range(total)] + [0] * (bucket.tokens - total)
    assert slot_mapping.tolist() == pages + [-1] * (bucket.tokens - total)
    assert row_pages[0, :total].tolist() == slots.page_tables[0, 1, :total].tolist() == pages
