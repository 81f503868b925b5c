"""A whole model with the attention and GEMMs of --deterministic: one row in any steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from attention.backend import Capacity, Shape
from attention.batch_invariant import backend, kernel
from attention.batch_invariant.backend import BatchInvariantBackend
from attention.batch_invariant.kernel import BatchInvariantConfig
from attention.batch_invariant.plan import BatchInvariantSpec
from model_zoo.config import ModelConfig, read_config
from model_zoo.layers import linear
from model_zoo.layers.delta_net.block import use_token_by_token
from model_zoo.layers.gemm.batch_invariant import use_batch_invariant_gemms
from tests.support.interpreter.ordered_dot import ordered_dot  # noqa: F401
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PAGE, PagedRow
from tests.support.models.tiny_checkpoints import write_checkpoint

LENGTH = 22
# A prompt at once; a part, and then one after the other, as if each had been sampled; both in turn.
STEPS = [[], list(range(14, LENGTH)), [1, 2, 17, 18]]
SMALL = BatchInvariantConfig(block_m=16, block_n=16, split=16, warps=4, stages=1, ctas_per_sm=1)


def back_end(config: ModelConfig, dtype: torch.dtype, device: str) -> BatchInvariantBackend:
    shape = Shape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE,
        dtype=dtype,
        kv_dtype=dtype,
    )
    windows = tuple({spec.window for spec in config.attention_specs})
    capacity = Capacity(rows=1, tokens=LENGTH)
    return BatchInvariantBackend(shape, capacity, torch.device(device), windows=windows)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        ("qwen3.5-text", torch.bfloat16),
        pytest.param("gpt2", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_token_of_an_answer_has_the_bits_of_one_of_a_prompt(
    kind: str,
    dtype: torch.dtype,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """So a sequence that is preempted, and computed again as a prompt, goes on as it would have."""
    for module in (kernel, backend):
        monkeypatch.setattr(module, "batch_invariant_config", lambda head_dim, dtype: SMALL)
    # Room for few splits: the interpreter takes long to plan for many.
    monkeypatch.setattr(backend, "BatchInvariantSpec", partial(BatchInvariantSpec, units=16))
    monkeypatch.setattr(linear, "can_reorder", lambda weight: False)
    write_checkpoint(kind, tmp_path)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=dtype, device=torch.device(device))
    use_batch_invariant_gemms(model)
    use_token_by_token(model)
    tokens = torch.randint(config.vocab_size, (LENGTH,), device=device)
    whole, *others = (
        PagedRow(
            model, config, dtype, device=device, backend=back_end(config, dtype, device)
        ).feed_in_steps(tokens, cuts)
        for cuts in STEPS
    )
    assert whole.isfinite().all()
    assert all(torch.equal(logits, whole) for logits in others)
