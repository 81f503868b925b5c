"""The engine with a simulated device answers as any other, and needs no model."""

from __future__ import annotations

from benchmarks.schedule.device_model import H100
from benchmarks.schedule.simulated_engine import DelayedDevice, load
from runtime.config import EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams


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
