"""Which engines pad small images and have graphs of their encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from attention.backend import BackendChoice
from runtime.config import EngineConfig
from runtime.memory_plan import MemoryPlan
from runtime.startup import engine_spec as module
from runtime.startup.engine_spec import EngineSpec, resolve_engine_spec
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.models.tiny_vision import write_vision_checkpoint

GPU = torch.device("cuda", 0)
PLAN = MemoryPlan(free=1 << 30, share=1.0)


def spec_of(checkpoint: Path, **changes: object) -> EngineSpec:
    config = EngineConfig(model=str(checkpoint), device="cpu", dtype="float32", threads=1)
    return resolve_engine_spec(structs.replace(config, **changes))


@pytest.fixture
def seeing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """Of a model that reads images of up to 4 million pixels, on a GPU that is not there."""
    write_vision_checkpoint("qwen3-vl", tmp_path)
    monkeypatch.setattr(module, "kernel_for", lambda device, head_dim, dtype: "varlen")
    monkeypatch.setattr(EngineSpec, "_full_wave_sizes", lambda self, most: ())
    return replace(spec_of(tmp_path), device=GPU, choice=BackendChoice("flash2"))


def test_on_a_gpu_images_of_at_most_1024_patches_are_encoded_whole(seeing: EngineSpec) -> None:
    assert seeing.encoder_rows == (128, 256, 384, 512, 640, 768, 896, 1024)
    assert seeing.resolve_config(PLAN).whole_image_tokens == 256
    requested = structs.replace(seeing.requested, max_image_pixels=300 * 16**2)
    smaller = replace(seeing, requested=requested)
    assert smaller.encoder_rows == (128, 256, 384)
    assert smaller.resolve_config(PLAN).whole_image_tokens == 96


@pytest.mark.parametrize("why", ["a CPU", "steps without graphs", "lengths on the host"])
def test_elsewhere_no_image_is_padded(
    why: str, seeing: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "a CPU":
        seeing = replace(seeing, device=torch.device("cpu"))
    elif why == "steps without graphs":
        seeing = replace(seeing, choice=BackendChoice("mha"))
    else:
        monkeypatch.setattr(module, "kernel_for", lambda device, head_dim, dtype: "sdpa")
    assert seeing.encoder_rows == ()
    assert seeing.resolve_config(PLAN).whole_image_tokens == 0


def test_a_model_of_text_and_one_whose_images_are_refused_have_none(
    tmp_path: Path, seeing: EngineSpec
) -> None:
    for name, options in (("qwen3", {}), ("qwen3-vl", {"max_image_pixels": 0})):
        folder = tmp_path / name
        folder.mkdir()
        write = write_checkpoint if name == "qwen3" else write_vision_checkpoint
        write(name, folder)
        found = replace(spec_of(folder, **options), device=GPU, choice=BackendChoice("flash2"))
        assert found.encoder_rows == ()
