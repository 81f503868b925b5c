"""Linear: y = x W^T + b, with packed weights on CPUs and autotuned GEMMs on GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import fused_kernels
from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.all_reduce.symmetric_buffers import RankSum
from model_zoo.layers.gemm.by_rows import GemmsByRows
from model_zoo.layers.gemm.implementations import GemmImpl, NormingGemm
from model_zoo.layers.normed_rows import Norm, NormedRows, NormOutput
from model_zoo.layers.padded_rows import padded_rows
from model_zoo.layers.projection import Projection, Run
from model_zoo.layers.quantized_gemm.int8.cpu import OneDnnInt8
from model_zoo.layers.quantized_gemm.packed_parameters import PackedParameters
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_rows import (
    Consumer,
    Producer,
    QuantizedRows,
    QuantizedRowsGemm,
    ScaleKind,
    UnscaledGemm,
    UnscaledRows,
)
from model_zoo.parallel.shard import Part
from model_zoo.quantization.weight_scheme import WeightScheme

# From this many rows on, cuBLAS adds the output to the residual (addmm): on an H100, addmm and norm
# took 2 % less of a layer of 1667 rows than a GEMM followed by a fused sum and norm.  With 803 rows
# addmm took up to 5 % longer than a GEMM; the total has not been measured there.
MIN_ADDMM_ROWS = 1024


class Linear(nn.Module):
    """weight [out, in], bias [out] or None.  Call prepare() once the weights are loaded.

    parts       the checkpoint's layers that are fused into this one, in order: name -> outputs
    scheme      of a quantized weight, which is in `packed` then, and `weight` is empty
    transposed  the checkpoint stores [in, out]
    runs        where the rows of the one layer in `parts` go; empty: in the checkpoint's order
    after       the kernel that computes x, and quantizes it where input_scales says so (unless a
                GEMM has taken its place), of a scheme with activations in fp8 or int8; None:
                another one
    cuts        what the rank has of layers that are divided, by their names in `parts`
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        parts: Mapping[str, int] | None = None,
        scheme: WeightScheme | None = None,
        transposed: bool = False,
        runs: tuple[Run, ...] = (),
        after: Producer | None = None,
        cuts: Mapping[str, Part] | None = None,
    ) -> None:
        super().__init__()
        assert parts is None or sum(parts.values()) == outputs or (cuts and len(parts) == 1)
        assert not runs or (parts is not None and len(parts) == 1 and not bias)
        self._runs = runs
        self.inputs, self.outputs, self.dtype = inputs, outputs, dtype
        self.transposed = transposed
        # Kept only where it matters: autotuning would tell layers of one shape apart by it.
        self.after = after if scheme is not None and scheme.activation_bits == 8 else None
        self._parts, self._cuts = parts or {}, cuts or {}
        shape = (outputs, inputs) if scheme is None else (0,)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.packed = None if scheme is None else PackedParameters(scheme, outputs, inputs)
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        )
        self._reordered: Tensor | None = None
        self._gemms: GemmsByRows[GemmImpl] = GemmsByRows()
        self.is_batch_invariant = False
        # Other ranks compute the same and need the same bits: none may choose its GEMM by timing.
        self.is_replicated = False
        self.is_dequantized = False  # some of its weight is quantized in the checkpoint
        self.after_attention = False  # whose kernels compute x
        self._next_loads_ahead = True
        # In a tuple they are no submodules of this one.
        self._next: tuple[tuple[Norm, Consumer], ...] = ()
        # What reads the output multiplies scales, too: a GEMM may leave them to it (`unscaled`).
        self.may_leave_scales = False
        self.may_norm = True  # False: GEMMs of few rows leave the norms to a kernel of their own

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def operand(self) -> Tensor | PackedWeight:
        """The weight [out, in] as its GEMMs take it."""
        return self.weight if self.packed is None else self.packed.weight

    def projections(self) -> list[Projection]:
        """The checkpoint's layers of which this one is made."""
        found: list[Projection] = []
        first = 0
        for name, outputs in self._parts.items():
            cut = self._cuts.get(name)
            found.append(Projection(name, self, first, outputs, self._runs, cut))
            first += outputs
        return found

    def prepare(self, *, keep_weight: bool = False) -> None:
        """On a CPU, replace the weight by oneDNN's packed layout, in int8 for W8A8.

        keep_weight: another layer shares the plain weight.  A packed GEMM takes a third to nine
        tenths of the time, in float32 and bfloat16, for 1 to 256 rows (Zen 5, one thread).  Padding
        one row to four, which helps older CPUs, costs time there.
        """
        packed, unset = self.packed, self.gemm_of(1) is None
        if packed is not None:
            packed.narrow()
        if packed is not None and unset and packed.scheme.multiplies_integers:
            gemm = OneDnnInt8.of(packed.weight)
            self.use_gemms({}, gemm)
            self._reordered = gemm.weight
            packed.release()
        if self.packed is None and can_reorder(self.weight):
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            if not keep_weight:
                self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def use_gemms(
        self,
        gemms: Mapping[int, GemmImpl],
        fallback: GemmImpl | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Set the GEMM for each bucket of rows, as GemmsByRows.set.

        Where there is none an unquantized weight is multiplied by cuBLAS, and a quantized one by
        the GEMM that it has for more rows.

        batch_invariant: they have one order of summation, and none is autotuned
        """
        self.is_batch_invariant = batch_invariant
        if self.packed is None or fallback is not None:
            self._gemms.set(gemms, fallback)
        else:
            self._gemms.update(gemms)

    def update_gemms(self, gemms: Mapping[int, GemmImpl]) -> None:
        """Set those of some buckets of rows, and keep the others."""
        self._gemms.update(gemms)

    def replace_gemms(self, gemms: GemmsByRows[GemmImpl]) -> GemmsByRows[GemmImpl]:
        """Use these; returns those before."""
        before, self._gemms = self._gemms, gemms
        return before

    def add(self, x: NormOutput, residual: Tensor) -> tuple[Addend | None, Tensor]:
        """x [T, in], residual [T, out] -> (what the next norm adds to the residual, residual).

        None: cuBLAS added the output to residual, in place, with the error of a rounded output that
        is added and rounded again.  NormedRows: a GEMM of few rows added it as the norm would have.
        """
        norm = self.norm_in_gemm(x)
        if norm is not None:
            return self.add_to(residual, x, norm), residual
        adds = not self.is_batch_invariant and self.bias is None and len(x) >= MIN_ADDMM_ROWS
        if (
            adds
            and self.packed is None
            and isinstance(x, Tensor)
            and fused_kernels.use_fused_kernels(x.device)
            and x.dtype in (torch.bfloat16, torch.float16)
        ):
            return None, residual.addmm_(x, self.weight.t())
        return self.for_norm(x), residual

    def norm_in_gemm(self, x: NormOutput) -> Norm | None:
        """The norm of the residual and the output of which the GEMM, by `add_to`, and the next one
        do the work."""
        if self.next is None or not isinstance(x, Tensor) or self.norming_gemm(len(x)) is None:
            return None
        norm, consumer = self.next
        return norm if consumer.takes_normed(len(x)) else None

    def add_to(
        self, residual: Tensor, x: NormOutput, norm: Norm, *, rank_sum: RankSum | None = None
    ) -> NormedRows:
        """As NormingGemm.add_to, where norm_in_gemm has named the norm."""
        gemm = self.norming_gemm(len(x))
        assert gemm is not None and isinstance(x, Tensor)
        x, operand = x.contiguous(), self.operand
        return gemm.add_to(residual, x, operand, self.bias, norm, rank_sum=rank_sum)

    def precedes(self, norm: Norm, consumer: Consumer) -> None:
        """The norm adds this layer's output to the residual, and gives its own to the consumer.

        Where something else is added before the norm, it is given no NormedRows.
        """
        self._next = ((norm, consumer),)
        self._next_loads_ahead = consumer.loads_ahead

    def precedes_nothing(self) -> None:
        """No norm follows, or one without a Consumer."""
        self._next, self._next_loads_ahead = (), True

    @property
    def next(self) -> tuple[Norm, Consumer] | None:
        """The norm that follows, and what takes its output, by `precedes`."""
        return self._next[0] if self._next else None

    @property
    def adds_to_residual(self) -> bool:
        """Whether a norm follows, by `precedes`."""
        return bool(self._next)

    def norming_gemm(self, rows: int) -> NormingGemm | None:
        """What multiplies so many rows and can do the work of the norms before and after it.

        None in float16: the sum times a norm's weight may be larger than it can be.
        """
        gemm = self.gemm_of(rows)
        may = self.may_norm and not self.is_batch_invariant and self.dtype != torch.float16
        return gemm if may and isinstance(gemm, NormingGemm) and gemm.norms(rows) else None

    def takes_normed(self, rows: int) -> bool:
        """As Consumer.takes_normed."""
        return self.norming_gemm(rows) is not None

    def multiply_first(self, x: NormOutput) -> Tensor:
        """As Consumer.multiply_first."""
        return self(x)

    @property
    def loads_ahead(self) -> bool:
        """As Consumer.loads_ahead."""
        return True

    @property
    def between_attention_and_experts(self) -> bool:
        """Whether its GEMM of few rows loads weights while attention runs, and the next none while
        it runs itself: then it is the faster the more multiprocessors it uses."""
        return self.after_attention and not self._next_loads_ahead

    def for_norm(self, x: NormOutput) -> Addend:
        """x [T, in] -> [T, out], for a norm that adds it."""
        return self.unscaled(x)

    def unscaled(self, x: NormOutput) -> Tensor | UnscaledRows:
        """x [T, in] -> [T, out], without its scales if the GEMM leaves them to what follows."""
        gemm = self.gemm_of(len(x))
        leaves = isinstance(gemm, UnscaledGemm) and self.may_leave_scales and self.bias is None
        if leaves and not isinstance(x, NormedRows):
            x = x.contiguous() if isinstance(x, Tensor) else x
            return gemm.unscaled(x, self.operand)
        return self(x)

    def gemm_of(self, rows: int) -> GemmImpl | None:
        """What multiplies so many rows; None: cuBLAS, or on a CPU PyTorch's product."""
        return self._gemms.of(rows)

    def all_gemms(self) -> list[GemmImpl | None]:
        """As GemmsByRows.all."""
        return self._gemms.all()

    def sizes_above(self, rows: int) -> list[int]:
        """As GemmsByRows.sizes_above."""
        return self._gemms.sizes_above(rows)

    def input_scales(self, rows: int) -> ScaleKind | None:
        """The scales of the QuantizedRows that it takes for x [rows, in]; None: only a Tensor."""
        gemm = self.gemm_of(rows)
        return gemm.kind if isinstance(gemm, QuantizedRowsGemm) else None

    def forward(self, x: NormOutput) -> Tensor:
        """x [T, in] -> [T, out]."""
        gemm = self.gemm_of(len(x))
        if isinstance(x, NormedRows):
            assert isinstance(gemm, NormingGemm), "takes_normed has not been asked"
            return gemm.multiply(x, self.operand, self.bias, None)
        if isinstance(x, QuantizedRows):
            assert isinstance(gemm, QuantizedRowsGemm), "input_scales has not been asked"
            return gemm.product(x, self.operand, self.bias)
        if gemm is not None:
            return gemm.run(x.contiguous(), self.operand, self.bias)
        assert self.packed is None, "use_quantized_gemms has not been called"
        if self._reordered is None:
            return F.linear(x, self.weight, self.bias)
        rows = padded_rows(len(x))
        if rows > len(x):
            padded = F.pad(x, (0, 0, 0, rows - len(x)))
            return self._reordered_gemm(padded)[: len(x)]
        return self._reordered_gemm(x)

    def _reordered_gemm(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._reordered, self.bias, "none", [], "")


def can_reorder(weight: Tensor) -> bool:
    """Whether `prepare` reorders the weight."""
    return weight.device.type == "cpu" and cpu_reorders(weight.dtype)


def cpu_reorders(dtype: torch.dtype) -> bool:
    """Whether this CPU and PyTorch build have oneDNN's packed GEMM for weights of this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
