"""Every model computes what transformers computes, whole, in chunks and token by token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from model_zoo.config import read_config
from model_zoo.layers.delta_net import block
from model_zoo.layers.moe.block import MoE
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import KINDS, write_checkpoint

CPU = torch.device("cpu")
LENGTH = 100
STEPS = [[], [1], [37, 64], [96, 97, 98, 99]]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path):
    reference = write_checkpoint(kind, tmp_path)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (LENGTH,))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0].float()
    for cuts in STEPS:
        logits = PagedRow(model, config, torch.float32).feed_in_steps(tokens, cuts)
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_one_product_for_all_projections_of_a_delta_net_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which aligned rows allow: 8 value heads, where these have 2."""
    monkeypatch.setattr(block, "ALIGNED", 4)
    reference = write_checkpoint("qwen3.5-text", tmp_path)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    mixers = [module for module in model.modules() if isinstance(module, block.DeltaNet)]
    assert mixers and all(mixer.ba is None for mixer in mixers)
    tokens = torch.randint(config.vocab_size, (LENGTH,))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0].float()
    logits = PagedRow(model, config, torch.float32).feed_in_steps(tokens, STEPS[2])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_computes_on_for_the_last_tokens_alone(kind: str, tmp_path: Path):
    write_checkpoint(kind, tmp_path)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (LENGTH,))
    cuts = [37, 64]
    expected = PagedRow(model, config, torch.float32).feed_in_steps(tokens, cuts)
    rows: list[int] = []
    for layer in model.layers:
        mlp = layer.mlp
        first = mlp.router if isinstance(mlp, MoE) else mlp.down
        first.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    row = PagedRow(model, config, torch.float32)
    for begin, end in pairwise([0, *cuts, LENGTH]):
        [logits] = row.feed(tokens[begin:end], only_last=True)
        assert (logits - expected[end - 1]).abs().max() <= 1e-4 * expected.abs().max()
        assert rows == [end - begin] * (len(model.layers) - 1) + [1]
        rows.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind", ["qwen3", "llama3", "gpt2", "gpt-oss", "glm4-moe", "qwen3.5", "qwen3-next"]
)
def test_half_precision_errs_no_more_than_transformers_does(
    kind: str, dtype: torch.dtype, tmp_path: Path
):
    reference = write_checkpoint(kind, tmp_path)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=dtype, device=CPU)
    tokens = torch.randint(config.vocab_size, (LENGTH,))
    with torch.inference_mode():
        exact = reference(tokens[None]).logits[0]
        rounded = reference.to(dtype)(tokens[None]).logits[0].float()
    logits = PagedRow(model, config, dtype).feed(tokens)
    assert (logits - exact).abs().mean() <= 2 * (rounded - exact).abs().mean()


def test_dummy_weights_are_random_and_finite(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    config = read_config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU, load_format="dummy")
    logits = PagedRow(model, config, torch.float32).feed(torch.arange(20))
    assert logits.isfinite().all() and logits.std() > 0
