"""A kernel of the gated delta net that decodes, run on a case and compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model_zoo.layers.delta_net.reference import gated_delta_net_reference
from tests.support.delta_net.cases import DeltaNetCase

# A last digit, of the largest mantissa.
DIGIT = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def decoded(case: DeltaNetCase, kernel: Callable[..., None]) -> Tensor:
    """What `kernel` writes; NaN where it writes nothing."""
    out = torch.full_like(case.z, float("nan"), memory_format=torch.contiguous_format)
    kernel(*case.arguments, out)
    return out


def assert_decoded_right(case: DeltaNetCase, run: Callable[[DeltaNetCase], Tensor]) -> None:
    """Output and pools are those of the definition, but for rounding and float32 sums."""
    exact = case.double()
    expected, found = gated_delta_net_reference(*exact.arguments), run(case)
    digit = DIGIT[case.qkv.dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=digit, atol=2e-5)
    assert torch.equal(case.state.conv.cpu().double(), exact.state.conv)
    digit = DIGIT[case.state.state.dtype]
    tokens = case.rows.max_tokens  # each of which is rounded once where the state is
    torch.testing.assert_close(
        case.state.state.cpu().double(), exact.state.state, rtol=tokens * digit, atol=2e-5
    )


def assert_overlapped_as_alone(layers: Sequence[DeltaNetCase], kernel: Callable[..., None]) -> None:
    """On a GPU: in a graph, where calls overlap, the layers' outputs and pools have the bits of
    calls that begin when all before is complete."""
    alone = [layer.copy() for layer in layers]
    # Calls of copies compile the kernel, and allocate what it keeps.
    outs = [decoded(layer.copy(), kernel) for layer in layers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, out in zip(layers, outs, strict=True):
            kernel(*layer.arguments, out)
    for _ in range(20):
        graph.replay()
        for layer, out in zip(alone, outs, strict=True):
            torch.cuda.synchronize()
            assert torch.equal(decoded(layer, kernel), out)
    for layer, other in zip(layers, alone, strict=True):
        assert torch.equal(layer.state.state, other.state.state)
        assert torch.equal(layer.state.conv, other.state.conv)
