"""Which prompts a step takes first: short ones soon, and no prompt starves."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.support.engine.simulated_server import SimulatedServer, warmed


def test_prompts_that_come_together_do_not_wait_for_each_other_to_the_end() -> None:
    server = SimulatedServer()
    for id in range(8):
        server.add(id, 1024)
    server.run()
    assert server.first[0] < 0.4 * server.first[7]


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
