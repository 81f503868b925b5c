"""Steps that replay captured graphs give what the same steps give without, on a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from runtime.cuda_graph.executor import GraphExecutor
from runtime.messages import RequestOutput
from tests.support.engine.graph_step_engine import (
    answers,
    capture_all,
    check_answers,
    make_engine,
    requests,
    results_of,
)
from tests.support.models.tiny_checkpoints import write_checkpoint


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama-yarn", "qwen2-moe", "qwen3-moe-some-layers"])
def test_whole_steps_serve_models_of_every_kind(kind: str, tmp_path: Path) -> None:
    """Learned positions, no norm of queries and keys, experts."""
    write_checkpoint(kind, tmp_path)
    check_answers(
        tmp_path,
        torch.device("cuda", torch.cuda.current_device()),
        requests(seed=4, count=60),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_answer_as_the_same_steps_without_graphs(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    """To the bit: the same kernels run on the same padded steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = requests(seed=2, count=150)
    found: list[dict[int, list[RequestOutput]]] = []
    for with_graphs in (True, False):
        engine, runner = make_engine(checkpoint, device, graph_steps=True, dtype=dtype)
        assert isinstance(runner, GraphExecutor)
        if with_graphs:
            capture_all(runner)
        found.append(answers(engine, wanted, random.Random(1)))
    for request in wanted:
        graph, plain = (results_of(answer[request.id]) for answer in found)
        assert graph[:2] == plain[:2], request
        assert torch.equal(graph[2], plain[2])


@pytest.mark.gpu
def test_graphs_that_are_captured_between_steps_change_no_answer(checkpoint: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = requests(seed=3, count=40)
    engine, _ = make_engine(checkpoint, device, graph_steps=True)
    plain = answers(engine, wanted, random.Random(1))
    engine, runner = make_engine(checkpoint, device, graph_steps=True)
    assert isinstance(runner, GraphExecutor)
    graphs = runner.graphs
    run = engine.step

    def step_and_capture() -> list[RequestOutput]:
        runner.prepare()
        return run()

    engine.step = step_and_capture  # type: ignore[method-assign]
    got = answers(engine, wanted, random.Random(1))
    assert len(graphs.captured) > 5
    for request in wanted:
        assert results_of(got[request.id])[0] == results_of(plain[request.id])[0]


@pytest.mark.gpu
def test_a_load_right_after_the_start_captures_nothing_and_is_answered_the_same(
    checkpoint: Path,
) -> None:
    """Steps of sizes that have no graph yet run in larger ones."""
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = requests(seed=6, count=60)
    engine, _ = make_engine(checkpoint, device, graph_steps=True)
    plain = answers(engine, wanted, random.Random(1))
    engine, runner = make_engine(checkpoint, device, graph_steps=True)
    assert isinstance(runner, GraphExecutor)
    runner.capture_startup_set()
    known, counts = set(runner.graphs.captured), runner.graph_counts
    counts.reset()
    got = answers(engine, wanted, random.Random(1))
    assert set(runner.graphs.captured) == known
    assert counts.captures == 0 and counts.steps_in_larger > 0
    for request in wanted:
        assert results_of(got[request.id])[0] == results_of(plain[request.id])[0]
