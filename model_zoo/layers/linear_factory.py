"""LinearFactory: creates a model's linear layers, each with the scheme of its weight.

Sizes are those of the rank, if the model is divided among several; each layer says along which axis
it is (model_zoo/parallel/shard.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from model_zoo.layers.embedding import Embedding, LMHead
from model_zoo.layers.linear import Linear
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.projection import Run
from model_zoo.layers.quantized_rows import Producer
from model_zoo.layers.row_parallel import RowParallelLinear
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.parallel.communicator import Alone, Communicator
from model_zoo.parallel.shard import WHOLE, Part, Shard
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
    shard: Shard = WHOLE
    communicator: Communicator = field(default_factory=Alone)

    def column(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        transposed: bool = False,
        after: Producer | None = None,
        blocks: Mapping[str, Sequence[int]] | None = None,
    ) -> Linear:
        """A Linear of which each rank computes some outputs; parts, transposed, after as there.

        blocks: of parts that the checkpoint has in several blocks, such as one tensor of queries,
        keys and values, of each of which a rank has a part: what this rank has of each
        """
        sizes = {name: (outputs,) for name, outputs in parts.items()} | dict(blocks or {})
        cuts = self._outputs(sizes)
        return self.linear(inputs, parts, cuts, bias=bias, transposed=transposed, after=after)

    def heads(
        self,
        inputs: int,
        queries: Mapping[str, int],
        keys_values: Mapping[str, int],
        *,
        bias: bool,
        after: Producer | None = None,
    ) -> Linear:
        """Queries, keys and values, fused; names -> outputs of this rank's heads.

        Several ranks have the same KV heads where there are fewer of them than ranks.
        """
        cuts = self._outputs({name: (outputs,) for name, outputs in queries.items()})
        of_kv = {name: (outputs,) for name, outputs in keys_values.items()}
        cuts |= self._outputs(of_kv, copies=self.shard.kv_copies)
        return self.linear(inputs, {**queries, **keys_values}, cuts, bias=bias, after=after)

    def row(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        transposed: bool = False,
        after: Producer | None = None,
        summed: bool = True,
    ) -> Linear:
        """A Linear of which each rank multiplies some inputs.

        summed: its output is the sum over all ranks; if not, the caller adds others to it first
        """
        cut = self.shard.part("inputs", (inputs,))
        if cut is None:
            linear = self.linear(inputs, parts, bias=bias, transposed=transposed, after=after)
            linear.may_leave_scales = summed  # a norm adds the output to the residual
            return linear
        cuts = dict.fromkeys(parts, cut)
        bias = bias and self.shard.rank == 0
        if not summed:
            return self.linear(inputs, parts, cuts, bias=bias, transposed=transposed, after=after)
        return RowParallelLinear(
            inputs,
            sum(parts.values()),
            bias=bias,
            dtype=self.dtype,
            communicator=self.communicator,
            parts=parts,
            scheme=self._scheme(parts, inputs),
            cuts=cuts,
            transposed=transposed,
            after=after,
        )

    def linear(
        self,
        inputs: int,
        parts: Mapping[str, int],
        cuts: Mapping[str, Part] | None = None,
        *,
        bias: bool,
        transposed: bool = False,
        after: Producer | None = None,
    ) -> Linear:
        """parts, transposed, after, cuts: as in Linear; of what is not in cuts a rank has all."""
        return Linear(
            inputs,
            sum(parts.values()),
            bias=bias,
            dtype=self.dtype,
            parts=parts,
            scheme=self._scheme(parts, inputs),
            transposed=transposed,
            after=after,
            cuts=cuts,
        )

    def _outputs(self, blocks: Mapping[str, Sequence[int]], *, copies: int = 1) -> dict[str, Part]:
        """What this rank has of layers whose outputs are divided."""
        found = {
            name: self.shard.part("outputs", sizes, copies=copies) for name, sizes in blocks.items()
        }
        return {name: cut for name, cut in found.items() if cut is not None}

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
            cuts=self._outputs({name: tuple(parts.values())}),
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

        gelu, after: as in SwigluLinear.  Each rank computes some outputs.
        """
        parts = {gate: outputs, up: outputs}
        return SwigluLinear(
            inputs,
            outputs,
            bias=bias,
            dtype=self.dtype,
            parts=parts,
            scheme=self._scheme(parts, inputs),
            cuts=self._outputs({gate: (outputs,), up: (outputs,)}),
            gelu=gelu,
            after=after,
        )

    def unquantized(self, inputs: int, outputs: int, *, bias: bool) -> Linear:
        """A Linear whose weight the model names itself, and which is never quantized.

        Every rank has all of it.
        """
        linear = Linear(inputs, outputs, bias=bias, dtype=self.dtype)
        linear.is_replicated = self.shard.size > 1
        return linear

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

    def embedding(self, vocab: int, size: int, *, scale: float) -> Embedding:
        """Each rank has some rows of the vocabulary."""
        part, rows = self.shard.vocabulary(vocab)
        return Embedding(
            rows, size, self.dtype, scale=scale, part=part, communicator=self.communicator
        )

    def head(self, vocab: int, inputs: int, name: str, tied: Embedding | None) -> LMHead:
        """tied: the embedding whose weight the head shares.  Each rank computes some logits."""
        part, rows = self.shard.vocabulary(vocab)
        parts = {name: vocab if part is None else part.own}
        cuts = {} if part is None else {name: part}
        scheme = None if tied is not None else self._scheme(parts, inputs)
        return LMHead(rows, inputs, self.dtype, tied, parts=parts, scheme=scheme, cuts=cuts)

    def _scheme(self, parts: Mapping[str, int], inputs: int) -> WeightScheme | None:
        """That of layers whose columns are not padded; experts' are."""
        scheme = self.scheme_of(parts, inputs)
        return scheme if scheme is not None and inputs % BLOCK == 0 else None
