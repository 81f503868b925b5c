"""A kernel of the gated delta net that decodes, run on a case and compared with float64."""

from __future__ import annotations

from collections.abc import Callable

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
