"""The benchmark of a conversation counts what is cached, and a hybrid server caches enough."""

from __future__ import annotations

from pathlib import Path

from benchmarks.server.bench_conversation import (
    Lengths,
    Turn,
    arguments,
    in_common,
    misses,
    talk,
    write,
)
from benchmarks.server.bench_loads import server
from tests.support.server.server_process import free_port


def test_what_two_prompts_have_in_common_ends_at_the_first_difference():
    assert in_common([1, 2, 3], [1, 2, 4]) == 2
    assert in_common([1, 2], [1, 2, 3]) == in_common([1, 2, 3], [1, 2]) == 2
    assert in_common([], [1]) == in_common([2], [1]) == 0


def test_a_turn_with_too_little_in_the_cache_or_too_late_is_a_miss():
    turns = [Turn(100, 0, 0, 900.0), Turn(200, 101, 95, 50.0), Turn(300, 201, 189, 70.0)]
    assert misses(turns, 0.95, 0.0) == ["turn 3: 94.5% of what is shared is cached"]
    assert misses(turns, 0.9, 60.0) == ["turn 3: the first token took 70.0 ms"]
    assert misses(turns[:1], 0.95, 60.0) == [], "the first turn has nothing to find"


def test_a_hybrid_server_caches_nearly_all_that_turns_share(tmp_path: Path):
    """With answers in the history, and with a part of each left out."""
    model = write(arguments().parse_args(["--tiny"]), tmp_path)
    options = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "4096"]
    port = free_port()
    with server(model, port, tmp_path / "serve.log", options):
        for reasoning in (0, 20):
            lengths = Lengths(turns=3, total=2400, message=60, answer=40, reasoning=reasoning)
            turns, messages = talk(f"http://127.0.0.1:{port}", lengths)
            assert [len(message["content"]) for message in messages[1::2]] == [40 - reasoning] * 3
            assert all(turn.shared > 2000 and turn.ms > 0 for turn in turns[1:])
            assert misses(turns, 0.9, 0.0) == []
