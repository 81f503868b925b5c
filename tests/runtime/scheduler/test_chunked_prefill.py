"""How prompts are chunked while others decode, seen in the steps of a simulated device."""

from __future__ import annotations

import pytest

from benchmarks.schedule.device_model import H100, load_of
from runtime.scheduler.chunked_prefill import GPU, MAX_MIXED_STEPS, UNNOTICED_GAP_SECONDS
from tests.support.engine.simulated_server import SimulatedServer, mixed, warmed


@pytest.mark.parametrize("target_ms", [12.0, 20.0, 40.0])
@pytest.mark.parametrize("rows", [4, 32, 100])
def test_steps_with_rows_that_decode_stay_within_the_target(target_ms: float, rows: int) -> None:
    server = SimulatedServer(target_ms=target_ms)
    warmed(server, rows)
    for id in range(2000, 2006):
        server.add(id, 4000)
    server.step(60)
    loads = mixed(server.batches)
    min_chunk = GPU.min_prefill_tokens + GPU.tile  # the smallest chunk, however long it takes
    over = [load for load in loads if H100.step_ms(load) > 1.25 * target_ms]
    assert loads and all(load.prompt_tokens < min_chunk for load in over)
    assert max(load.prompt_tokens for load in loads) >= GPU.min_prefill_tokens


def test_a_higher_target_lets_more_of_a_prompt_in() -> None:
    most: list[int] = []
    for target_ms in (10.0, 20.0, 40.0, 80.0):
        server = SimulatedServer(target_ms=target_ms)
        warmed(server, 32)
        server.add(2000, 8000)
        server.step(10)
        most.append(max(load.prompt_tokens for load in mixed(server.batches)))
    assert most == sorted(set(most))


def test_a_prompt_that_is_alone_takes_all_that_a_step_can() -> None:
    server = SimulatedServer()
    server.add(1, 16_000)
    server.step(2)
    assert [batch.q_lens.tolist() for batch in server.batches] == [[8192], [7808]]


def test_prompts_without_end_leave_a_step_to_those_that_decode_now_and_then() -> None:
    """Else nothing tells what decoding alone takes, and prompts could stay in too small parts."""
    server = SimulatedServer()
    warmed(server, 64)
    for id in range(1000):
        server.add(2000 + id, 4000, max_tokens=4)
    server.step(MAX_MIXED_STEPS // 2)
    began = len(server.batches)
    server.step(2 * MAX_MIXED_STEPS)
    loads = [load_of(batch) for batch in server.batches[began:]]
    assert server.engine.requests.prefilling
    assert 1 <= sum(load.rows > 0 and not load.prompt_tokens for load in loads) <= 6


def test_a_step_beside_some_rows_is_small_while_little_waits() -> None:
    """Of 256 tokens, which an H100 computes in about the time that it reads the weights."""
    most: list[int] = []
    for prompts in (2, 60):
        server = SimulatedServer()
        warmed(server, 32)
        for id in range(prompts):
            server.add(2000 + id, 2000)
        server.step(4)
        most.append(max(len(batch.tokens) for batch in server.batches[-3:]))
    assert most[0] <= 2 * GPU.weight_bound_tokens < most[1]


def test_a_longer_queue_gets_larger_steps() -> None:
    most: list[int] = []
    for prompts in (1, 30):
        server = SimulatedServer()
        warmed(server, 16)
        for id in range(prompts):
            server.add(2000 + id, 4000)
        server.step(6)
        most.append(max(load.prompt_tokens for load in mixed(server.batches)))
    assert most[1] > 1.8 * most[0]


def test_few_rows_beside_very_many_prompts_do_not_keep_the_steps_small() -> None:
    most: list[int] = []
    for rows in (2, 100):
        server = SimulatedServer()
        warmed(server, rows)
        for id in range(60):
            server.add(2000 + id, 4000)
        server.step(3)
        most.append(max(load.prompt_tokens for load in mixed(server.batches)))
    assert most[0] > 2 * most[1]


def test_more_prompts_beside_fewer_rows_get_larger_steps() -> None:
    most: list[int] = []
    for rows in (4, 40):
        server = SimulatedServer()
        warmed(server, rows)
        for id in range(16):
            server.add(2000 + id, 8000)
        server.step(8)
        most.append(max(load.prompt_tokens for load in mixed(server.batches)))
    assert most[0] > 1.5 * most[1]


def test_a_cpu_has_no_automatic_target() -> None:
    server = SimulatedServer(device="cpu")
    server.add(1, 100, max_tokens=50)
    server.step(3)
    server.add(2, 8000)
    server.step()
    assert server.batches[-1].q_lens.tolist() == [1, 8000]


def test_a_cpu_that_is_asked_for_a_target_takes_small_steps() -> None:
    server = SimulatedServer(device="cpu", target_ms=5.0)
    server.add(1, 100, max_tokens=50)
    server.step(3)
    server.add(2, 8000)
    server.step(4)
    assert all(load.prompt_tokens < 64 for load in mixed(server.batches))


def test_clients_that_begin_together_are_spread_before_the_third_request() -> None:
    """128 clients of 1024/256: the queue of their first and second prompts is not met again."""
    server = SimulatedServer()
    sent: dict[int, float] = {}

    def send(id: int) -> None:
        sent[id] = server.clock.now
        server.add(id, 1024, max_tokens=256)

    for id in range(8):  # the mix of requests is known, as on a server that has warmed up
        send(id)
    server.run()
    for id in range(1000, 1128):
        send(id)
    while len(sent) < 8 + 4 * 128:
        seen = len(server.outputs)
        server.step()
        for output in server.outputs[seen:]:
            if output.finish is not None:
                send(output.id + 1000)
    server.run()
    waited = [
        sorted(server.first[id] - sent[id] for id in sent if id // 1000 == round)[64]
        for round in (1, 2, 3, 4)
    ]
    assert max(waited[2:]) < 0.3 * min(waited[:2])


def test_a_queue_without_room_does_not_make_the_steps_larger() -> None:
    """All slots are taken: larger steps would not let those in who wait."""
    most: list[int] = []
    for waiting in (0, 200):
        server = SimulatedServer(max_num_seqs=33)
        warmed(server, 32)
        server.add(2000, 4000)
        for id in range(waiting):
            server.add(3000 + id, 2000)
        server.step(6)
        most.append(max(load.prompt_tokens for load in mixed(server.batches)))
    assert most[0] == most[1]


def test_a_short_prompt_beside_few_rows_makes_no_gap_that_is_noticed() -> None:
    server = SimulatedServer()
    warmed(server, 8)
    server.add(2000, 1024)
    server.step(8)
    loads = mixed(server.batches)
    assert loads and all(H100.step_ms(load) < 1100 * UNNOTICED_GAP_SECONDS for load in loads)


def test_steps_that_take_five_times_as_long_do_not_end_the_chunks() -> None:
    server = SimulatedServer(target_ms=25.0, stalls=0.03)
    warmed(server, 32)
    for id in range(2000, 2020):
        server.add(id, 4000, max_tokens=3)
    server.step(100)
    loads = mixed(server.batches)
    assert sum(load.prompt_tokens for load in loads) / len(loads) > 600
