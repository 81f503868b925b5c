"""Features that are added to the residual between two layers, beside GEMMs that compute norms."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_zoo.layers.gemm.implementations import MAX_ROWS, GemmImpl
from model_zoo.layers.linear import Linear
from runtime.messages import EngineRequest, SamplingParams
from tests.support.engine.loaded_engine import loaded_engine
from tests.support.gemm.counting_gemm import CountingGemm
from tests.support.models.tiny_vision import (
    library_answer,
    picture,
    prompt_with,
    write_vision_checkpoint,
)

STEPS = 12
TEXT = [5, 9, 17, 33, 2, 71, 8, 40, 41, 42]


def test_a_norm_after_features_is_not_of_the_sum_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reference = write_vision_checkpoint("qwen3-vl", tmp_path)
    gemm = CountingGemm()

    def gemm_of(layer: Linear, rows: int) -> GemmImpl | None:
        return gemm if rows <= MAX_ROWS and len(layer.weight) else None

    monkeypatch.setattr(Linear, "prepare", lambda layer, **options: None)
    monkeypatch.setattr(Linear, "gemm_of", gemm_of)
    tokens, images = prompt_with(TEXT, picture(3, 4, 0), TEXT)
    engine = loaded_engine(tmp_path, device="cpu")
    params = SamplingParams(max_tokens=STEPS, temperature=0)
    engine.add(EngineRequest(0, 0, tokens, params, images=images))
    answer: list[int] = []
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            answer += output.tokens
    assert answer == library_answer(reference, tokens, images, STEPS)
    assert "add" in gemm.done and len(tokens) <= MAX_ROWS
