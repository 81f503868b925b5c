"""The waiting queue, against a list that is sorted after every event."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.messages import EngineRequest, SamplingParams
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.waiting_queue import WaitingQueue


def sequence(arrival_index: int, priority: int) -> Sequence:
    request = EngineRequest(
        arrival_index, 0, [1] * (arrival_index % 7 + 1), SamplingParams(4), priority
    )
    return Sequence(request, seed=0, arrival_index=arrival_index, max_model_len=100)


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "take", "end", "back"]), st.integers(0, 400)),
        max_size=150,
    ),
    st.sampled_from([1, 3, 16]),
)
@settings(max_examples=200, deadline=None)
def test_the_front_is_the_first_in_rank_whatever_came_went_or_ended(
    events: list[tuple[str, int]], front: int
) -> None:
    queue = WaitingQueue()
    queue.FRONT = front
    waiting: list[Sequence] = []
    taken: list[Sequence] = []
    for number, (event, choice) in enumerate(events):
        if event == "push":
            waiting.append(sequence(number, choice % 3))
            queue.push(waiting[-1])
        elif event == "back" and taken:
            waiting.append(taken.pop(choice % len(taken)))
            queue.push(waiting[-1])
        elif event == "take" and waiting:
            first = queue.front()
            taken.append(first[choice % len(first)])
            waiting.remove(taken[-1])
            queue.remove(taken[-1])
        elif event == "end" and waiting:
            ended = waiting.pop(choice % len(waiting))
            ended.finish = "abort"
            queue.mark_finished(ended)
        waiting.sort(key=lambda one: one.priority_key)
        assert queue.front() == waiting[:front]
        assert queue.count == len(waiting)
        assert queue.num_tokens == sum(len(one.tokens) for one in waiting)
