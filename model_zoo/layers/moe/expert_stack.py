"""ExpertStack: one linear layer of every expert, in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.projection import FILLED_AT_ONCE
from model_zoo.layers.quantized_gemm.stacked_parameters import StackedParameters
from model_zoo.parallel.shard import Part
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.weight_scheme import WeightScheme


@dataclass(frozen=True, slots=True)
class ExpertProjection:
    """A linear layer of the checkpoint: some output features of one expert's layer."""

    name: str
    stack: ExpertStack
    expert: int
    first: int
    outputs: int
    part: Part | None = None  # as in Projection

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of its weight."""
        return self.outputs, self.stack.inputs

    @property
    def device(self) -> torch.device:
        return self.stack.device

    @property
    def transposed(self) -> bool:
        return False

    @property
    def scheme(self) -> WeightScheme | None:
        packed = self.stack.packed
        return None if packed is None else packed.scheme

    @property
    def weight(self) -> Tensor:
        """Where an unquantized weight belongs."""
        return self.stack.weight[self.expert, self.first : self.first + self.outputs]

    @property
    def bias(self) -> Tensor | None:
        bias = self.stack.bias
        return None if bias is None else bias[self.expert, self.first : self.first + self.outputs]

    @torch.no_grad()
    def fill(self, weight: QuantizedWeight) -> None:
        """Store a quantized weight [outputs, inputs], dequantized if the stack is unquantized."""
        for begin, end in weight.slices(FILLED_AT_ONCE):
            self.stack.store(self.expert, self.first + begin, weight.rows(begin, end))


class ExpertStack(nn.Module):
    """weight [E, N, K], or `packed` and an empty weight; bias [E, N] or None."""

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        scheme: WeightScheme | None = None,
    ) -> None:
        """scheme: of a quantized weight"""
        super().__init__()
        self.experts, self.outputs, self.inputs, self.dtype = experts, outputs, inputs, dtype
        shape = (experts, outputs, inputs) if scheme is None else (0,)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.is_dequantized = False  # some of it is quantized in the checkpoint
        self.packed: StackedParameters | None = None
        if scheme is not None:
            self.packed = StackedParameters(scheme, experts, outputs, inputs)
        self.bias: nn.Parameter | None = None
        if bias:
            room = torch.empty(experts, outputs, dtype=dtype)
            self.bias = nn.Parameter(room, requires_grad=False)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' weights."""
        return self.weight.nbytes if self.packed is None else self.packed.nbytes

    def store(self, expert: int, first: int, weight: QuantizedWeight) -> None:
        """Store rows from `first` on of an expert's weight."""
        if self.packed is None:
            rows = self.weight[expert, first : first + len(weight.codes)]
            rows.copy_(weight.dequantize(self.dtype))
            self.is_dequantized = True
        else:
            self.packed.store(expert, first, weight)

    def product(self, expert: int, x: Tensor) -> Tensor:
        """x [T, K] times one expert's weight, plus its bias -> [T, N]; by PyTorch's operations."""
        assert self.packed is None, "packed experts need the kernels of a GPU"
        bias = None if self.bias is None else self.bias[expert]
        return F.linear(x, self.weight[expert], bias)
