"""How prompts are chunked while others decode, seen in the steps of a simulated device."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec import structs

from benchmarks.schedule.device_model import H100, SimulatedClock, SimulatedDevice, load_of
from benchmarks.schedule.host_step import fake_config
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, RequestOutput, SamplingParams
from runtime.scheduler.batch import Batch
from runtime.scheduler.chunked_prefill import (
    FIRST_TOKEN_WEIGHT,
    GPU,
    HEADROOM,
    MAX_MIXED_STEPS,
    UNNOTICED_GAP_SECONDS,
    ChunkBudget,
    PrefillLoad,
    RequestMix,
)
from runtime.scheduler.step_time import StepLoad, StepTimes


class SimulatedServer:
    """An engine on a simulated device, and what it has done."""

    def __init__(
        self,
        *,
        target_ms: float = 0.0,
        device: str = "cuda",
        stalls: float = 0.0,
        num_pages: int = 20_000,
        max_num_seqs: int = 256,
    ) -> None:
        self.clock = SimulatedClock()
        config = structs.replace(
            fake_config(max_num_seqs, 20_000),
            device=device, itl_target_ms=target_ms, num_pages=num_pages, prefix_cache=False,
        )  # fmt: skip
        self.device = SimulatedDevice(self.clock, 1, stalls)
        self.engine = Engine(config, 1000, self.device, clock=self.clock)
        self.batches: list[Batch] = []
        self.outputs: list[RequestOutput] = []
        self.first: dict[int, float] = {}
        self._forward = self.device.forward
        self.device.forward = self._note  # type: ignore[method-assign]

    def _note(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._forward(batch)

    def add(self, id: int, length: int, max_tokens: int = 100, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.engine.add(EngineRequest(id, 0, [id % 900 + 1] * length, params, priority))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.outputs.append(output)
                self.first.setdefault(output.id, self.clock.now)
            self.engine.requests.check_integrity()

    def run(self) -> None:
        for _ in range(20_000):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("no end in sight")


def mixed(batches: list[Batch]) -> list[StepLoad]:
    loads = [load_of(batch) for batch in batches]
    return [load for load in loads if load.rows and load.prompt_tokens]


def warmed(server: SimulatedServer, rows: int) -> None:
    """`rows` sequences that decode for long, and a few prompts to learn from."""
    for id in range(rows):
        server.add(id, 500, max_tokens=1000)
    for id in range(1000, 1010):
        server.add(id, 6000, max_tokens=2)
        server.step(8)
    while server.engine.requests.prefilling or server.engine.requests.waiting.count:
        server.step()
    server.engine.requests.mix.record(0, 0, 1_000_000)  # as if prompts had been short until now
    server.batches.clear()


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


def test_prompts_that_come_together_do_not_wait_for_each_other_to_the_end() -> None:
    server = SimulatedServer()
    for id in range(8):
        server.add(id, 1024)
    server.run()
    assert server.first[0] < 0.4 * server.first[7]


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


def budget_of(
    times: StepTimes, *, target_ms: float = 0.0, mix: tuple[int, int] = (0, 0)
) -> ChunkBudget:
    """A budget on a GPU; `mix`: tokens computed and generated for the requests so far."""
    seen = RequestMix()
    seen.record(mix[0], 0, mix[1])
    config = structs.replace(fake_config(256, 9000), device="cuda", itl_target_ms=target_ms)
    return ChunkBudget(config, times, seen)


def learned(decode_ms: float, token_us: float) -> StepTimes:
    """Times of a device on which decode rows take `decode_ms`, however many."""
    times = StepTimes()
    for tokens in (256, 512, 1024, 2048) * 20:
        times.record(StepLoad(100, tokens, 1, 0.0), decode_ms / 1e3 + tokens * token_us / 1e6)
        times.record(StepLoad(100, 0, 1, 0.0), decode_ms / 1e3)
        times.record(StepLoad(10, 0, 1, 0.0), decode_ms / 1e3)
    return times


def mean_tokens(budget: ChunkBudget, rows: int, load: PrefillLoad, steps: int = 200) -> float:
    return sum(budget.tokens(rows, 1, load) for _ in range(steps)) / steps


def test_the_first_chunk_beside_rows_that_decode_is_a_small_one() -> None:
    budget = budget_of(StepTimes())
    assert budget.tokens(10, 1000, PrefillLoad(1, 100_000, 0, 0, 0)) <= 4 * GPU.min_prefill_tokens


@pytest.mark.parametrize("ratio", [1, 4, 10])
def test_prompts_are_computed_as_fast_as_answers_bring_new_ones(ratio: int) -> None:
    """Rows that end bring `ratio` prompt tokens for each of their tokens."""
    budget = budget_of(learned(20.0, 20.0), mix=(1000 * ratio, 1000))
    tokens = mean_tokens(budget, 100, PrefillLoad(1, 2000, 0, 0, 0))
    flow = HEADROOM * 100 * ratio
    assert 0.99 * flow <= tokens < flow + 150  # what rounding still carries is not in the mean


def test_the_queue_is_worked_off_with_the_least_waiting_of_all() -> None:
    """The mean of the steps minimizes the cost of the docs, found here by trying all sizes."""
    decode, token, rows, prompts, waiting = 0.020, 20e-6, 60, 100, 100_000
    budget = budget_of(learned(1e3 * decode, 1e6 * token))

    def cost(tokens: int) -> float:
        step = decode + tokens * token
        queue = (prompts + 1) / 2 * waiting / tokens * step
        return rows * step + queue / FIRST_TOKEN_WEIGHT

    best = min(range(128, 8192), key=cost)
    tokens = mean_tokens(budget, rows, PrefillLoad(prompts, waiting, 0, 0, 0))
    assert abs(tokens - best) < 0.05 * best


def echo(rows_computed: int, waiting: int, answer: int = 250) -> tuple[ChunkBudget, PrefillLoad]:
    """80 rows, and prompts of 1,000 tokens that wait; requests so far were of 1000/`answer`."""
    budget = budget_of(learned(10.0, 20.0), mix=(1000, answer))
    budget._mix.count_row(rows_computed, 0)  # pyright: ignore[reportPrivateUsage]
    return budget, PrefillLoad(waiting // 1000, waiting, 0, 0, rows_computed)


def test_a_queue_that_answers_ending_together_made_is_not_computed_as_one_group_again() -> None:
    """flow is 400 and drain 506: together 645, where all 120 requests spread evenly take 600."""
    budget, load = echo(80_000, 40_000)
    even = HEADROOM * 120_000 / 250
    assert mean_tokens(budget, 80, load) == pytest.approx(even, rel=0.03)
    both = (400**2 + 506**2) ** 0.5  # what the prompts have computed comes back, too
    tokens = mean_tokens(budget, 80, load._replace(num_computed=40_000))
    assert tokens == pytest.approx(both, rel=0.03)


def test_a_queue_of_more_than_the_even_steps_is_drained_as_if_nothing_else_came() -> None:
    """flow is 400 and drain 1,256; all 180 requests spread evenly would take 900."""
    budget, load = echo(80_000, 100_000)
    drain = (101 / 2 * 100_000 * 0.010 / (20e-6 * 80 * FIRST_TOKEN_WEIGHT)) ** 0.5
    assert mean_tokens(budget, 80, load) == pytest.approx(drain, rel=0.03)


def test_steps_are_not_smaller_than_the_flow_where_the_rows_have_shorter_prompts() -> None:
    budget, load = echo(8_000, 2_000)
    assert mean_tokens(budget, 80, load) >= HEADROOM * 80 * 1000 / 250


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


def test_a_target_that_decode_rows_alone_exceed_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = PrefillLoad(1, 2000, 0, 0, 0)
    kept = budget_of(learned(20.0, 20.0), target_ms=30.0)
    missed = budget_of(learned(20.0, 20.0), target_ms=15.0)
    for _ in range(3):
        assert kept.tokens(100, 1, load) > 0
    assert not caplog.records
    for _ in range(3):
        assert missed.tokens(100, 1, load) >= GPU.min_prefill_tokens  # the prompt goes on
    [record] = caplog.records
    assert "--itl-target-ms 15 cannot be kept: 100 decode rows" in record.getMessage()


def test_cached_prompt_tokens_do_not_count_as_computed() -> None:
    mix = RequestMix()
    assert (mix.computed_per_generated(0), mix.computed_share) == (0.0, 1.0)
    for _ in range(1000):
        mix.record(30_000, 29_700, 200)
    mix.count_row(0, 0)
    assert mix.computed_per_generated(0) == pytest.approx(1.5)
    assert mix.computed_share == pytest.approx(0.01)
    for _ in range(3000):
        mix.record(1000, 0, 100)
    assert mix.computed_per_generated(0) == pytest.approx(10.0, rel=0.01)


def test_rows_with_long_answers_show_that_the_mix_has_changed_before_they_end() -> None:
    mix = RequestMix()
    for _ in range(1000):
        mix.record(6000, 0, 2)
    before = mix.computed_per_generated(0)
    for _ in range(32):
        mix.count_row(500, 0)
    assert mix.computed_per_generated(32 * 500) == before == pytest.approx(3000)
    assert mix.computed_per_generated(32 * (500 + 1000)) < 60
    for _ in range(32):
        mix.count_row(500, 0, -1)
    assert mix.computed_per_generated(0) == before


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


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    server = SimulatedServer()
    warmed(server, 8)
    server.add(2000, 16_000)
    server.add(2001, 12_000)
    server.step(3)
    server.add(2002, 100)
    server.step(2)
    assert 2002 in server.first and 2000 not in server.first
    server.step(200)
    assert server.first[2000] < server.first[2001]


def test_a_short_prompt_of_lower_priority_waits() -> None:
    server = SimulatedServer()
    warmed(server, 8)
    server.add(2000, 8000, priority=0)
    server.step(2)
    server.add(2001, 100, priority=1)
    server.step(60)
    assert server.first[2000] <= server.first[2001]


def test_a_long_prompt_ends_however_many_short_ones_come() -> None:
    server = SimulatedServer(max_num_seqs=64)
    warmed(server, 4)
    server.add(2000, 10_000)
    steps = 0
    while 2000 not in server.first:
        for place in range(4):
            server.add(10_000 + 4 * steps + place, 200, max_tokens=2)
        server.step()
        steps += 1
        assert steps < 60, "a long prompt starves"


def test_a_long_prompt_without_pages_is_not_overtaken_for_ever() -> None:
    server = SimulatedServer(num_pages=1000, max_num_seqs=64)
    for id in range(8):
        server.add(id, 1500, max_tokens=60)
    server.step(2)
    server.add(2000, 12_000, max_tokens=2)
    steps = 0
    while 2000 not in server.first:
        server.add(10_000 + steps, 500, max_tokens=40)
        server.step()
        steps += 1
        assert steps < 400, "a long prompt starves"


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """(step, prompt, answer, priority) of each request."""
    one = st.tuples(
        st.integers(0, 40),
        st.sampled_from([1, 20, 300, 1000, 5000]),
        st.integers(1, 30),
        st.sampled_from([0, 0, 0, 1]),
    )
    return sorted(draw(st.lists(one, min_size=1, max_size=40)))


@given(
    arrivals(),
    st.sampled_from([0.0, 8.0, 25.0, 100.0]),
    st.sampled_from([400, 2000, 20_000]),
    st.sampled_from([2, 8, 256]),
)
@settings(max_examples=40, deadline=None)
def test_every_request_ends_and_the_first_in_rank_gets_half(
    requests: list[tuple[int, int, int, int]], target_ms: float, num_pages: int, slots: int
) -> None:
    server = SimulatedServer(target_ms=target_ms, num_pages=num_pages, max_num_seqs=slots)
    table = server.engine.requests
    expected = 0
    for id, (at, length, answer, priority) in enumerate(requests):
        while len(server.batches) < at and not server.engine.idle:
            server.step()
        server.add(id, length, answer, priority)
        expected += answer
    while not server.engine.idle:
        under_way = dict(table.prefilling)
        preempted, made = table.num_preemptions, len(server.batches)
        first = min(under_way.values(), key=lambda one: one.priority_key, default=None)
        wanted = (first.num_new_tokens, first.slot) if first is not None else (0, -1)
        ahead = table.waiting.head()
        server.step()
        batches = server.batches[made:]
        if first is None or preempted != table.num_preemptions or not batches:
            continue
        if ahead is not None and ahead.priority_key < first.priority_key:
            continue
        batch = batches[0]
        fed = dict(zip(batch.slots, batch.q_lens, strict=True)).get(wanted[1], 0)
        prompt_tokens = batch.num_tokens - batch.decode_rows
        assert 2 * fed >= prompt_tokens or fed == wanted[0]
    ended = [output for output in server.outputs if output.finish is not None]
    assert len(ended) == len(requests)
    answered = {output.id for output in ended if output.finish == "length"}
    assert answered == {id for id, one in enumerate(requests) if one[1] + one[2] <= num_pages * 16}
    assert sum(len(output.tokens) for output in server.outputs) == sum(
        requests[id][2] for id in answered
    )
    assert expected >= sum(requests[id][2] for id in answered)
