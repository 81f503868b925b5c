"""gated_delta_net as a model's step calls it: by the kernels that its rows need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers import fused_kernels
from model_zoo.layers.delta_net import prompts
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net, plan_rows
from model_zoo.layers.delta_net.inputs import CHUNK, DeltaNetRows, Snapshots
from model_zoo.layers.delta_net.reference import gated_delta_net_reference
from tests.support.delta_net.cases import DeltaNetCase, delta_net_case, int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, where the interpreter runs them."""
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)


def error(found: Tensor, expected: Tensor) -> float:
    """The root of the mean squared difference, over that of what was expected."""
    difference = found.cpu().double() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


def assert_right(case: DeltaNetCase, rows: DeltaNetRows, bound: float) -> None:
    exact = case.double()
    expected = gated_delta_net_reference(*exact.arguments)
    found = gated_delta_net(*case.arguments[:-1], rows)
    assert error(found, expected) < bound and error(case.state.state, exact.state.state) < bound
    assert torch.equal(case.state.conv.cpu().double(), exact.state.conv)
    padding = int(case.rows.cu_seqlens[-1])
    assert not found[padding:].any()


@pytest.mark.parametrize("planned", [False, True])
def test_rows_of_all_kinds_share_a_step(device: str, planned: bool):
    snapshots = Snapshots(
        int32([0, 0, 0, CHUNK, 0, CHUNK, 0, 0], device),
        int32([-1, -1, -1, 5, -1, 6, -1, -1], device)[:, None],
    )
    case = delta_net_case(
        [1, 0, 4, 90, 1, 20, 0, 2], [63, 0, 0, 10, 700, 50, 0, 3], padding=7,
        slots=[0, -1, 2, 3, 1, 4, -1, -1], snapshots=snapshots, device=device,
    )  # fmt: skip
    rows = plan_rows(case.rows, len(case.qkv)) if planned else case.rows
    assert (rows.chunks is not None) == planned
    assert_right(case, rows, 1e-5)


def test_steps_of_few_tokens_a_row_launch_nothing_for_prompts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "delta_net_prompts", None)
    case = delta_net_case([1, 8], [4, 5])
    assert plan_rows(case.rows, 9) is case.rows
    assert_right(case, case.rows, 1e-5)


def test_a_convolution_that_kernels_do_not_take_is_refused_by_name():
    case = delta_net_case([1], conv_size=5)
    with pytest.raises(ValueError, match=r"convolution of 5 tokens.*linear_conv_kernel_dim.*a CPU"):
        gated_delta_net(*case.arguments)


def test_dimensions_that_kernels_do_not_take_are_refused_by_name():
    case = delta_net_case([1], dims=(16, 24))
    with pytest.raises(ValueError, match=r"16 \(keys\) and 24 \(values\).*powers of two.*a CPU"):
        gated_delta_net(*case.arguments)


def snapshots_of(first: list[int], slots: list[int]) -> Snapshots:
    return Snapshots(int32(first, "cuda"), int32(slots, "cuda")[:, None])


@pytest.mark.gpu
def test_a_graph_serves_other_rows_than_it_was_captured_with():
    lens, before = [1, 1, 300, 1, 40], [5, 900, 0, 64, 70]
    shape = {"heads": (16, 48), "dims": (128, 128), "dtype": BF16, "device": "cuda"}
    case = delta_net_case(
        lens, before, padding=40, slots=[0, 1, 2, 3, 4], free_slots=2,
        snapshots=snapshots_of([0, 0, 128, 0, 0], [-1, -1, 5, -1, -1]), **shape,
    )  # fmt: skip
    graph, static = torch.cuda.CUDAGraph(), case.copy()

    def step() -> Tensor:
        rows = plan_rows(replace(static.rows, max_tokens=2048), len(static.qkv))
        return gated_delta_net(*static.arguments[:-1], rows)

    step()  # compiles
    with torch.cuda.graph(graph):
        out = step()
    others = delta_net_case(
        [64, 0, 1, 8, 290], [64, 0, 3, 9, 11], padding=20, seed=1, slots=[4, -1, 1, 2, 3],
        free_slots=2, snapshots=snapshots_of([128, 0, 0, 0, 256], [6, -1, -1, -1, 0]), **shape,
    )  # fmt: skip
    for new in (case, others):
        for name in ("qkv", "z", "b", "a"):
            getattr(static, name).copy_(getattr(new, name))
        for name in ("cu_seqlens", "cache_seqlens", "slots"):
            getattr(static.rows, name).copy_(getattr(new.rows, name))
        for name in ("first", "slots"):
            getattr(static.rows.snapshots, name).copy_(getattr(new.rows.snapshots, name))
        static.state.conv.copy_(new.state.conv)
        static.state.state.copy_(new.state.state)
        same = replace(new.copy(), weights=static.weights).double()
        expected = gated_delta_net_reference(*same.arguments)
        graph.replay()
        assert error(out, expected) < 2**-6
        assert error(static.state.state, same.state.state) < 2**-6


@pytest.mark.gpu
def test_a_prompt_is_mixed_as_by_flash_linear_attention():
    fla = pytest.importorskip("fla.ops.gated_delta_rule", reason="flash-linear-attention")
    heads, dim, tokens = (16, 48), 128, 1000
    case = delta_net_case(
        [tokens], [0], heads=heads, dims=(dim, dim), dtype=BF16, device="cuda", free_slots=0
    )
    x = F.pad(case.qkv.float(), (0, 0, 3, 0)).unfold(0, 4, 1)  # [T, conv_dim, 4]
    mixed = F.silu((x * case.weights.conv.float()).sum(-1)).to(BF16)[None]
    keys = heads[0] * dim
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in mixed.split([keys, keys, 48 * dim], -1))
    q, k = (part.repeat_interleave(3, 2) for part in (q, k))
    g = -case.weights.a_log.exp() * F.softplus(case.a.float() + case.weights.dt_bias)
    o, state = fla.chunk_gated_delta_rule(
        q, k, v, g[None], case.b.float().sigmoid()[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    normed = o.float() * (o.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = normed * case.weights.norm.float() * F.silu(case.z.float().view(o.shape))
    found = gated_delta_net(*case.arguments)
    assert error(found, expected.flatten(2)[0].cpu().double()) < 2**-6
    assert error(case.state.state.mT, state.cpu().double()) < 2**-6
