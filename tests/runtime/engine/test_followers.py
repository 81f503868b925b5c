"""What rank 0 does when another rank, or a step, does not end."""

from __future__ import annotations

import threading

from runtime.engine.followers import StallWatch


def test_a_loop_that_does_not_come_round_ends_the_process_with_a_message():
    ended, said = threading.Event(), []

    def end(message: str) -> None:
        said.append(message)
        ended.set()

    StallWatch(end, 0.05, look_seconds=0.01)
    assert ended.wait(20)
    assert said == ["a step has not ended for 0 s: a rank hangs; all ranks start again"]


def test_a_loop_that_comes_round_is_left_alone():
    ended = threading.Event()
    watch = StallWatch(lambda message: ended.set(), 0.5, look_seconds=0.01)
    for _ in range(20):
        watch.alive()
        assert not ended.wait(0.05)
