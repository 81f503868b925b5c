"""--calculate-kv-scales: scales of fp8 keys and values from a prompt at start."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.kv_pool import KVPool
from model_zoo.config import read_config
from runtime.config import ConfigError, EngineConfig
from runtime.startup.calculated_scales import LARGEST, MARGIN, next_scale
from runtime.startup.loading import Loaded, load
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")
DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "kv_dtype": "fp8_e4m3",
    "calculate_kv_scales": True,
}
LARGE = 3000.0  # far more than e4m3 holds


def config_of(directory: Path, **options: object) -> EngineConfig:
    return EngineConfig(
        model=str(directory), kv_tokens=512, max_num_seqs=2,
        **DEFAULTS | options,  # type: ignore[arg-type]
    )  # fmt: skip


def start(config: EngineConfig) -> tuple[Loaded, KVPool]:
    loaded = load(config, lambda phase, done, total: None)
    return loaded, loaded.executor._kv


def with_large(kind: str, directory: Path) -> Path:
    """Qwen2, one of whose heads has large keys or values in one layer: by the bias."""
    write_checkpoint("qwen2", directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    bias = tensors[f"model.layers.1.self_attn.{kind}_proj.bias"]
    bias[: len(bias) // 2] += LARGE * torch.sign(torch.randn(len(bias) // 2))
    save_file(tensors, file)
    return directory


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scales_are_powers_of_two_with_room_above_what_a_prompt_has(device: str, tmp_path: Path):
    dtype = "float32" if device == "cpu" else "bfloat16"
    loaded, kv = start(config_of(with_large("k", tmp_path), device=device, dtype=dtype))
    assert kv.k_scale is not None and kv.v_scale is not None
    for scale in (*kv.k_scale.flatten().tolist(), *kv.v_scale.flatten().tolist()):
        assert math.log2(scale).is_integer()
    large, others = kv.k_scale[1, 0], [*kv.k_scale[0].tolist(), float(kv.k_scale[1, 1])]
    assert LARGE * MARGIN / LARGEST <= large <= 8 * LARGE * MARGIN / LARGEST
    assert all(scale <= 1 for scale in others) and (kv.v_scale <= 1).all()
    assert "pages fp8_e4m3 with calculated scales" in loaded.ready.attention


def test_logits_of_a_model_with_large_values_are_saved(tmp_path: Path):
    """With scales of 1 they are cut off."""
    config = read_config(with_large("v", tmp_path))
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (48,), generator=torch.Generator().manual_seed(1))

    def logits(kv: KVPool | None) -> Tensor:
        row = PagedRow(model, config, torch.float32 if kv is None else torch.float8_e4m3fn)
        if kv is not None:
            for mine, found in ((row.kv.k_scale, kv.k_scale), (row.kv.v_scale, kv.v_scale)):
                assert mine is not None and found is not None
                mine.copy_(found)
        return row.feed(tokens)

    exact = logits(None)
    calculated, ones = (
        (logits(start(config_of(tmp_path, calculate_kv_scales=of))[1]) - exact).norm()
        for of in (True, False)
    )
    assert calculated <= 0.1 * ones, (calculated, ones)


def test_scales_of_the_checkpoint_are_kept(tmp_path: Path):
    directory = with_large("k", tmp_path)
    file = directory / "model.safetensors"
    save_file(
        load_file(file) | {"model.layers.1.self_attn.k_scale": torch.tensor([0.5, 7.0])}, file
    )
    loaded, kv = start(config_of(directory))
    assert kv.k_scale is not None and kv.k_scale[1].tolist() == [0.5, 7.0]
    assert (kv.k_scale[0] == 1).all() and "calculated" not in loaded.ready.attention


def test_every_group_of_layers_has_scales_of_its_own_pages(tmp_path: Path):
    """Gemma's layers with a window have other pages than those without."""
    write_checkpoint("gemma3", tmp_path)
    _, kv = start(config_of(tmp_path))
    _, again = start(config_of(tmp_path, seed=3))
    assert len({layer.group for layer in kv.layers}) > 1
    for mine, other in ((kv.k_scale, again.k_scale), (kv.v_scale, again.v_scale)):
        assert mine is not None and other is not None
        assert torch.equal(mine, other), "the prompt is always the same"
        assert (mine < 1).all() and (mine > 0).all()


def test_other_pages_have_no_scales_to_calculate(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=r"--calculate-kv-scales .* --kv-dtype fp8_e4m3, or"):
        start(config_of(tmp_path, kv_dtype="auto"))


def test_a_scale_grows_while_numbers_are_cut_off_and_none_comes_from_damaged_ones():
    largest = torch.tensor([448.0, 448.0, 100.0, 0.0, torch.nan, 56.0])
    scale = torch.tensor([1.0, 16.0, 16.0, 2.0, 4.0, 1.0])
    assert next_scale(largest, scale).tolist() == [16.0, 256.0, 8.0, 2.0, 4.0, 0.25]
