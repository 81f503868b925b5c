"""LinearFactory: creates a model's linear layers, each with the scheme of its weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from model_zoo.layers.embedding import Embedding, LMHead
from model_zoo.layers.linear import Linear, Run, SwigluLinear
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.quantized_rows import Producer
from model_zoo.quantization.weight_scheme import BLOCK, WeightScheme

# The checkpoint's layers that are fused (name -> outputs), inputs -> the scheme of their weight,
# if columns are padded to whole blocks; None: unquantized.
SchemeOf = Callable[[Mapping[str, int], int], WeightScheme | None]


def unquantized(parts: Mapping[str, int], inputs: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class LinearFactory:
    dtype: torch.dtype  # of unquantized weights, biases and activations
    scheme_of: SchemeOf = unquantized

    def linear(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        transposed: bool = False,
        after: Producer | None = None,
    ) -> Linear:
        """parts, transposed, after: as in Linear."""
        return Linear(
            inputs,
            sum(parts.values()),
            bias=bias,
            dtype=self.dtype,
            parts=parts,
            scheme=self._scheme(parts, inputs),
            transposed=transposed,
            after=after,
        )

    def interleaved(self, inputs: int, name: str, sizes: Sequence[int], heads: int) -> Linear:
        """A Linear whose outputs the checkpoint stores by head, `sizes` of each kind.

        Here all outputs of a kind are side by side, in the order of the heads.
        """
        parts = {name: sum(sizes) * heads}
        scheme = self.scheme_of(parts, inputs)
        if scheme is not None and any(size % scheme.row_group for size in sizes):
            scheme = None  # rows of one scale would be torn apart
        runs: list[Run] = []
        for head in range(heads):
            source, first = head * sum(sizes), 0
            for size in sizes:
                runs.append(Run(source, size, first + head * size))
                source, first = source + size, first + heads * size
        return Linear(
            inputs,
            sum(parts.values()),
            bias=False,
            dtype=self.dtype,
            parts=parts,
            scheme=scheme,
            runs=tuple(runs),
        )

    def swiglu(
        self,
        inputs: int,
        outputs: int,
        gate: str,
        up: str,
        *,
        bias: bool,
        gelu: bool = False,
        after: Producer | None = None,
    ) -> SwigluLinear:
        """gate, up: the checkpoint's names of the two projections to `outputs`.

        gelu, after: as in SwigluLinear
        """
        parts = {gate: outputs, up: outputs}
        scheme = self._scheme(parts, inputs)
        return SwigluLinear(
            inputs,
            outputs,
            bias=bias,
            dtype=self.dtype,
            parts=parts,
            scheme=scheme,
            gelu=gelu,
            after=after,
        )

    def unquantized(self, inputs: int, outputs: int, *, bias: bool) -> Linear:
        """A Linear whose weight the model names itself, and which is never quantized."""
        return Linear(inputs, outputs, bias=bias, dtype=self.dtype)

    def experts(
        self, count: int, outputs: int, inputs: int, parts: Mapping[str, int], *, bias: bool
    ) -> ExpertStack:
        """parts: the layers of all experts, which are packed if one scheme is that of all."""
        scheme = self.scheme_of(parts, inputs)
        if scheme is not None and scheme.permuted:  # differently for each expert
            scheme = None
        if scheme is not None and scheme.multiplies_integers:  # which no grouped GEMM does
            scheme = replace(scheme, activation_bits=16, activation_zeros=False)
        return ExpertStack(count, outputs, inputs, bias=bias, dtype=self.dtype, scheme=scheme)

    def head(self, vocab: int, inputs: int, name: str, tied: Embedding | None) -> LMHead:
        """tied: the embedding whose weight the head shares."""
        parts = {name: vocab}
        scheme = None if tied is not None else self._scheme(parts, inputs)
        return LMHead(vocab, inputs, self.dtype, tied, parts=parts, scheme=scheme)

    def _scheme(self, parts: Mapping[str, int], inputs: int) -> WeightScheme | None:
        """That of layers whose columns are not padded; experts' are."""
        scheme = self.scheme_of(parts, inputs)
        return scheme if scheme is not None and inputs % BLOCK == 0 else None
