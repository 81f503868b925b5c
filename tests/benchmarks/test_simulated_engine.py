"""The engine with a simulated device answers as any other, and needs no model."""

from __future__ import annotations

from pathlib import Path

import httpx

from benchmarks.schedule.device_model import H100
from benchmarks.schedule.simulated_engine import DelayedDevice, load
from benchmarks.server.bench_loads import server
from benchmarks.shapes import write_model
from runtime.config import EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams
from tests.support.server.server_process import free_port


def test_every_request_gets_its_tokens_in_steps_of_the_simulated_length() -> None:
    loaded = load(EngineConfig(model="none", max_model_len=64), lambda phase, done, total: None)
    assert loaded.ready.max_model_len == loaded.resolved.max_model_len == 64
    graphs = loaded.executor.graph_counts  # as the engine process does
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor, graphs=graphs)
    for id in range(3):
        engine.add(EngineRequest(id, 0, [5] * 20, SamplingParams(max_tokens=id + 1)))
    tokens: dict[int, list[int]] = {id: [] for id in range(3)}
    while not engine.idle:
        for output in engine.step():
            tokens[output.id] += output.tokens
    assert tokens == {0: [1], 1: [1, 1], 2: [1, 1, 1]}
    device = loaded.executor
    assert isinstance(device, DelayedDevice)
    for step, seconds in device.step_seconds:
        assert 0.9 < 1000 * seconds / H100.step_ms(step) < 1.3


def test_a_server_answers_with_it(tmp_path: Path) -> None:
    model = write_model("qwen3-8b", tmp_path / "model")
    options, port = ["--device", "cpu", "--max-model-len", "1024"], free_port()
    with server(model, port, tmp_path / "log", options, simulated="h200"):
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "model", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True},
            timeout=30,
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
