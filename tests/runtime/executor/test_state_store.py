"""Snapshots of recurrent states: copies to host memory and back, between steps."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from attention.kv_pool import KVPool
from attention.state_pool import StatePool
from runtime.config import ConfigError
from runtime.executor import state_store
from runtime.executor.state_store import StateStore
from runtime.scheduler.batch import make_batch

LAYERS, STATES, SNAPSHOTS = 3, 6, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_pool(device: str) -> KVPool:
    states = StatePool.allocate(
        layers=LAYERS,
        states=STATES,
        conv=(64, 3),
        matrix=(8, 32, 64),
        conv_dtype=torch.bfloat16,
        matrix_dtype=torch.float32,
        device=torch.device(device),
    )
    return KVPool.allocate(
        layers=1, pages=4, kv_heads=1, page_size=16, head_dim=16, dtype=torch.float32,
        device=torch.device(device), states=states,
    )  # fmt: skip


def fill(pool: StatePool, state: int, value: float) -> None:
    for tensor in pool.of(state):
        tensor.fill_(value)


def value_of(pool: StatePool, state: int) -> float:
    values = {float(v) for tensor in pool.of(state) for v in tensor.float().unique()}
    assert len(values) == 1, f"state {state} is of several steps: {values}"
    return values.pop()


@pytest.mark.parametrize("device", DEVICES)
def test_a_loaded_state_is_what_was_saved_however_copies_follow_each_other(device: str) -> None:
    kv, rng = make_pool(device), random.Random(3)
    pool = kv.states
    assert pool is not None
    store = StateStore(SNAPSHOTS, pool)
    states, snapshots = [0.0] * STATES, dict[int, float]()
    for step in range(1, 120):
        saves = [
            (rng.randrange(STATES), rng.randrange(SNAPSHOTS)) for _ in range(rng.choice([0, 1, 3]))
        ]
        saves = list({index: (state, index) for state, index in saves}.values())
        snapshots |= {index: states[state] for state, index in saves}
        known = sorted(snapshots)
        loads = (
            [(rng.choice(known), rng.randrange(STATES)) for _ in range(rng.choice([0, 1, 3]))]
            if known
            else []
        )
        loads = list({state: (index, state) for index, state in loads}.values())
        for index, state in loads:
            states[state] = snapshots[index]
        batch = replace(make_batch(), state_saves=tuple(saves), state_loads=tuple(loads))
        store.copy(batch, kv)
        changed = rng.randrange(STATES)  # by the step
        fill(pool, changed, step)
        states[changed] = float(step)
        if step % 10 == 0:
            assert [value_of(pool, state) for state in range(STATES)] == states


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_host_copy_of_a_snapshot() -> None:
    kv = make_pool("cuda")
    assert kv.states is not None
    store = StateStore(1, kv.states)
    batch = replace(make_batch(), state_saves=((0, 0),))
    store.copy(batch, kv)
    assert store._transfers is not None
    with torch.cuda.stream(store._transfers._stream):
        torch.cuda._sleep(2_000_000_000)  # about a second in front of the next copy
    store.copy(batch, kv)
    step = torch.cuda.Event()
    step.record()
    step.synchronize()
    assert not store._transfers._stream.query(), "the step has waited for the copy to the host"


@pytest.mark.gpu
def test_too_little_host_memory_is_an_error_that_names_the_option() -> None:
    kv = make_pool("cuda")
    assert kv.states is not None
    with (
        patch.object(state_store, "free_bytes", lambda device: 1 << 16),
        pytest.raises(ConfigError, match=r"--snapshot-bytes: 400 snapshots of states take .* left"),
    ):
        StateStore(400, kv.states)


@pytest.mark.gpu
def test_memory_of_a_store_that_is_gone_can_be_pinned_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = make_pool("cuda")
    assert kv.states is not None
    for _ in range(3):  # the system maps each at the addresses of the one before
        store = StateStore(4, kv.states)
        assert all(snapshots.is_pinned() for snapshots in store._snapshots)
        del store
    assert not caplog.records
