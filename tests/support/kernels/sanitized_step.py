"""The kernels of a step, for compute-sanitizer.

    python -m tests.support.kernels.sanitized_step NAME ...

layers    the kernels between the GEMMs of a layer
split_k   GEMMs of few rows, in plain Triton
stream    the same for Hopper
sample    a token for rows of all kinds, of few and of many groups
delta_net  gated delta nets of rows of one token and of prompts
constrained   tokens and scores of constrained rows, of few and of many groups
step      a tiny model through an engine, so that prepare and all others follow each other
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attention.kv_pool import KVPool
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net
from model_zoo.layers.delta_net.reference import gated_delta_net_reference
from model_zoo.layers.gemm.implementations import GemmImpl, SkinnyGemm, SplitK
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm
from model_zoo.layers.kernels.embed import embed
from model_zoo.layers.kernels.qk_norm_rope_write import qk_norm_rope_write
from model_zoo.layers.kernels.silu_mul import silu_mul
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rope, rotate
from model_zoo.rope_config import RopeConfig
from runtime.messages import EngineRequest, SamplingParams
from tests.support.delta_net.cases import delta_net_case
from tests.support.engine.device_engine import device_engine, sizes
from tests.support.kernels.constrained_rows_cases import ConstrainedSampler
from tests.support.kernels.sampler_cases import Kernels, SamplerRow, is_right, params
from tests.support.models.tiny_checkpoints import write_checkpoint

KINDS = [
    params(temperature=0),
    params(),
    params(top_p=0.9),
    params(temperature=0.6, top_k=20, top_p=0.95),
    params(top_k=900, top_p=0.8, min_p=0.01),
    params(temperature=0.7, frequency_penalty=0.5, repetition_penalty=1.2),
    params(min_tokens=3, stop_ids=(1, 2, 3), top_k=3),
]


def noise(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-6, torch.float16)
    norm.weight.normal_(1, 0.1)
    return norm.to("cuda")


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected.to("cpu", found.dtype), rtol=4e-3, atol=4e-3)


def layers() -> None:
    for rows, size in ((1, 64), (7, 1000), (33, 4096)):
        norm, x, residual = norm_of(size), noise(rows, size), noise(rows, size)
        expected = norm(x + residual)
        add_rms_norm(x, residual, norm.weight, norm.eps)
        near(x, expected)
        gate_up = noise(rows, 2 * size)
        gate, up = gate_up.chunk(2, -1)
        near(silu_mul(gate_up), F.silu(gate) * up)
        tokens = torch.randint(0, 50, (rows,), device="cuda")
        rope, table = Rope(RopeConfig(), 64).to("cuda"), noise(50, size)
        x, _, (cos_sin,) = embed(
            tokens, tokens, table, norm.weight, norm.eps, [(rope.frequencies, rope.scale)]
        )
        near(x, norm(table[tokens]))
        _heads(rows, cos_sin)


def _heads(rows: int, cos_sin: Tensor, heads: int = 6, kv_heads: int = 3) -> None:
    """Queries and keys are normed and turned; the last token has no place in the pages."""
    kv = KVPool.allocate(
        layers=1, pages=3, kv_heads=kv_heads, page_size=16, head_dim=64, dtype=torch.float16,
        device=torch.device("cuda"),
    )  # fmt: skip
    q_norm, k_norm = norm_of(64), norm_of(64)
    qkv = noise(rows, (heads + 2 * kv_heads) * 64)
    slots = torch.randperm(48, device="cuda")[:rows]
    slots[-1] = -1
    q, k, v = qkv.view(rows, -1, 64).split([heads, kv_heads, kv_heads], 1)
    expected, keys, values = rotate(q_norm(q), cos_sin), rotate(k_norm(k), cos_sin), v.clone()
    found = qk_norm_rope_write(
        qkv, kv.k[0], kv.v[0], slots, heads=heads, cos_sin=cos_sin, q_weight=q_norm.weight,
        k_weight=k_norm.weight, eps=1e-6, k_scale=None, v_scale=None,
    )  # fmt: skip
    near(found, expected)
    stored = slots[:-1]
    near(kv.k[0][stored // 16, :, stored % 16], keys[:-1])
    near(kv.v[0][stored // 16, :, stored % 16], values[:-1])


def gemms(tried: list[GemmImpl]) -> None:
    for outputs, inputs in ((200, 72), (333, 520), (64, 1024)):
        weight, bias = noise(outputs, inputs), noise(outputs)
        for rows in (1, 7, 33):
            x = noise(rows, inputs)
            # On the CPU: cuBLAS adds parts in 16 bits, and writes what initcheck does not see.
            expected = F.linear(*(tensor.cpu().double() for tensor in (x, weight, bias)))
            for gemm in tried:
                if gemm.serves(rows, outputs, inputs):
                    near(gemm.run(x, weight, bias), expected)


def sampled() -> None:
    for vocab, repeats in ((1111, 1), (40_000, 1), (9_000, 8)):
        rows = [
            SamplerRow(kind, seed=7 * index, history=(1, 2, 3, 3), prompt_len=2)
            for index, kind in enumerate(KINDS * repeats)
        ]
        logits = (torch.randn(len(rows), vocab) * 3).to(torch.bfloat16)
        kernels = Kernels(rows, vocab, "cuda")
        slots = [-1 if index % 5 == 4 else index for index in range(len(rows))]
        tokens, usable = kernels.run(logits, slots)
        for slot, token, row, values in zip(slots, tokens, rows, logits, strict=True):
            assert token == -1 if slot < 0 else is_right(token, row, values), row
        assert all(fine for slot, fine in zip(slots, usable, strict=True) if slot >= 0)


def constrained() -> None:
    kinds = [
        params(temperature=0, logit_bias={5: 99.0}, logprobs=3),
        params(allowed_ids=(3, 700), banned=((3, 700), (9,)), repetition_penalty=1.1),
        params(top_p=0.9, grammar="any", logprobs=20),
        params(logprobs=2, logprob_ids=(4, 900)),
    ]
    for vocab in (1111, 40_000):
        rows = [SamplerRow(kind, seed=7 * index) for index, kind in enumerate(kinds * 2)]
        logits = (torch.randn(len(rows), vocab) * 3).to(torch.bfloat16)
        every = np.ones(vocab, dtype=np.bool_)
        sampler_output, order = ConstrainedSampler(rows, vocab, "cuda").sample_tokens(
            logits, [1] * 8, {2: every, 6: every}
        )
        assert order == [0, 1, 2, 4, 5, 6, 3, 7] and sampler_output.usable.all()
        assert (
            sampler_output.tokens[[0, 3]].tolist() == [5, 5] and sampler_output.scores is not None
        )
        assert sampler_output.scores.ranks.min() >= 1


def delta_net() -> None:
    """Rows of all kinds, and padding; the last row's tokens end where the memory does."""
    for padding in (0, 5):
        case = delta_net_case(
            [1, 0, 4, 150, 1, 70], [63, 0, 0, 10, 700, 1], heads=(2, 6), dims=(32, 64),
            dtype=torch.float16, padding=padding, device="cuda",
        )  # fmt: skip
        exact = case.double()
        found = gated_delta_net(*case.arguments)
        expected = gated_delta_net_reference(*exact.arguments)
        torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-2, atol=1e-2)


def step() -> None:
    """Chunks, shared pages, slots that start over, rows that sample() serves."""
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint("qwen3", Path(folder))
        room = sizes(slots=3, budget=24, pages=7, page_size=16, max_len=64, prefix_cache=True)
        engine, _ = device_engine(Path(folder), device, room, graph_steps=True)
        for id, length in enumerate((1, 40, 17, 33)):
            sampling = SamplingParams(
                3, temperature=0.7 * (id % 2), logprobs=1 if id == 3 else None
            )
            engine.add(EngineRequest(id, 0, [place % 90 for place in range(length)], sampling))
        num_tokens = 0
        while not engine.idle:
            for output in engine.step():
                assert output.error is None
                num_tokens += len(output.tokens)
    assert num_tokens == 12


SKINNY_CONFIGS = [
    SkinnyGemm(64, 256, 3, 132),
    SkinnyGemm(32, 256, 4, 7),
    SkinnyGemm(16, 512, 4, 132),
]
SPLITS = [SplitK(32, 64, 1), SplitK(16, 128, 4)]
KERNELS: dict[str, Callable[[], None]] = {
    "layers": layers,
    "split_k": lambda: gemms([*SPLITS]),
    "stream": lambda: gemms([*SKINNY_CONFIGS]),
    "sample": sampled,
    "constrained": constrained,
    "delta_net": delta_net,
    "step": step,
}


def main() -> None:
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        KERNELS[name]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
