"""CheckpointLayers: which linear layers of a checkpoint are quantized, and how they will run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model_zoo.checkpoint import Checkpoint, CheckpointTensor, wrong_shape
from model_zoo.config import ModelError
from model_zoo.layers.projection import LoadedProjection
from model_zoo.layers.quantized_gemm.int8.cpu import Packs
from model_zoo.quantization.config import QuantizationConfig, read_quantization
from model_zoo.quantization.quantize import quantize_fp8
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.registry import SUFFIXES, check, read
from model_zoo.quantization.readers.resolve import resolve
from model_zoo.quantization.readers.tensor_spec import FLOATS, Present, tensor_name
from model_zoo.quantization.stored_format import ONLINE, StoredFormat
from model_zoo.quantization.weight_scheme import BLOCK, WeightScheme, scheme_for

Shape = tuple[int, int]  # [N, K] of a weight
HEAD = "lm_head"
# Of tensors' names, by suffix: a model with experts asks for all of them for thousands of layers.
ENDINGS = tuple((suffix, tensor_name("", suffix)) for suffix in SUFFIXES)
# Of tensors of all experts, whose first dimension is the expert.
STACKED_DIMENSIONS = {"_blocks": 4, "_scales": 3}


@dataclass(frozen=True, slots=True)
class CheckpointLayers:
    """The linear layers of the checkpoint in `directory`.

    checkpoint    None: there are no files (`--load-format dummy`), so that the config decides
    config        None: nothing is quantized
    quantization  "auto": as the checkpoint says; "fp8": quantize what is not, but for the LM head
                  and weights that kernels do not multiply
    packs         which packed weights the device multiplies, as packs_of says; others are
                  dequantized when they are loaded
    """

    directory: Path
    checkpoint: Checkpoint | None
    config: QuantizationConfig | None
    quantization: str
    packs: Packs

    @classmethod
    def open(
        cls,
        directory: Path,
        checkpoint: Checkpoint | None,
        *,
        quantization: str = "auto",
        packs: Packs,
    ) -> CheckpointLayers:
        """Raises ModelError for a quantization that no reader understands."""
        config = read_quantization(directory)
        if config is not None and quantization != "auto":
            raise ModelError(
                f"--quantization {quantization}: {config.path} says that the weights are quantized "
                f"already ({config.method}): leave the option out"
            )
        if quantization == "fp8" and packs is not True:
            raise ModelError(
                "--quantization fp8: a GPU of compute capability 8.0 or later is needed, and "
                "--dtype bfloat16 or float16: leave the option out"
            )
        return cls(directory, checkpoint, config, quantization, packs)

    def stored(self, name: str, shape: Shape) -> StoredFormat | None:
        """How the layer `name` is stored; None: not quantized.  Raises ModelError, as `resolve`."""
        if self.checkpoint is None:
            return self.config.stored(name) if self.config else None
        present = self.present(name)
        if self.config is None and present.get("weight", (torch.bfloat16,))[0] in FLOATS:
            return None
        return resolve(name, shape, self.config, present)

    def runs_as(self, name: str, shape: Shape) -> StoredFormat | None:
        """As `stored`, or what the layer is quantized to while it is loaded."""
        stored = self.stored(name, shape)
        if stored is not None or self.quantization != "fp8" or name == HEAD:
            return stored
        return ONLINE if scheme_for(ONLINE, shape[1]).fits(*shape) else None

    def scheme_of(self, parts: Mapping[str, int], inputs: int) -> WeightScheme | None:
        """The scheme of layers that are fused: name -> outputs.

        None: the weight is unquantized on the device, since it is so in the checkpoint, the layers
        differ, or no kernel multiplies it; what is quantized is dequantized when it is loaded.
        """
        schemes: set[WeightScheme | None] = set()
        for name, outputs in parts.items():
            stored = self.runs_as(name, (outputs, inputs))
            scale_dtype = _scale_dtype(self.present(name))
            schemes.add(stored and scheme_for(stored, inputs, scale_dtype))
        scheme = schemes.pop()
        if scheme is None or schemes or not self._packs(scheme, parts, inputs):
            return None
        return scheme if all(scheme.has_whole_groups(n, inputs) for n in parts.values()) else None

    def _packs(self, scheme: WeightScheme, names: Iterable[str], inputs: int) -> bool:
        """Whether the device multiplies a packed weight of these layers; inputs: K"""
        if self.packs != "int8":
            return self.packs
        experts = any(".experts." in name for name in names)  # which grouped GEMMs multiply
        return scheme.multiplies_integers and inputs % BLOCK == 0 and not experts

    def take(
        self, projection: LoadedProjection, sources: MutableMapping[str, CheckpointTensor]
    ) -> dict[str, CheckpointTensor] | None:
        """Remove the tensors of a layer that must be converted from `sources`: suffix -> tensor.

        None: the layer's weight is copied as it is.  Raises ModelError for wrong tensors.
        """
        name, shape = projection.name, projection.shape
        stored = self.stored(name, shape)
        if self.runs_as(name, shape) is None:
            return None
        found = _pop(name, sources)
        present = {s: (source.dtype, _of_one(s, source.shape)) for s, source in found.items()}
        if stored is not None:
            check(name, shape, stored, present)
        elif "weight" in found:
            expected = shape[::-1] if projection.transposed else shape
            _check_shape(found["weight"], expected)
        return found

    def take_stacked(
        self,
        name: str,
        experts: int,
        shape: Shape,
        sources: MutableMapping[str, CheckpointTensor],
    ) -> dict[str, CheckpointTensor] | None:
        """As `take`, the tensors that hold the quantized weights of all experts.

        shape: of the weight of one.  None: it is not quantized.
        """
        stored = self.stored(name, shape)
        if stored is None:
            return None
        found = _pop(name, sources)
        present = {s: (source.dtype, _of_one(s, source.shape)) for s, source in found.items()}
        check(name, shape, stored, present)
        for source in found.values():
            _check_shape(source, (experts, *source.shape[1:]))
        return found

    def reading(self, name: str, shape: Shape) -> Callable[[Mapping[str, Tensor]], QuantizedWeight]:
        """What the tensors of `take_stacked` of one expert mean."""
        stored = self.stored(name, shape)
        assert stored is not None
        return lambda tensors: read(tensors, stored, shape, name)

    def conversion(self, projection: LoadedProjection) -> Callable[[Mapping[str, Tensor]], None]:
        """Stores the tensors of `take`, by suffix, in the projection's parameters."""
        name, shape = projection.name, projection.shape
        stored = self.stored(name, shape)

        def convert(tensors: Mapping[str, Tensor]) -> None:
            if stored is None:
                weight = tensors["weight"]
                weight = quantize_fp8(weight.T if projection.transposed else weight)
            else:
                weight = read(tensors, stored, shape, name)
            try:
                projection.fill(weight)
            except ValueError as error:
                raise ModelError(
                    f"{self.directory}: {name}: {error}: use another quantized repository of this "
                    "model"
                ) from None

        return convert

    def present(self, name: str) -> Present:
        """What the files have of a layer, by suffix; the name may lack its outer part there."""
        if self.checkpoint is None:
            return {}
        sources = self.checkpoint.sources
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for module in (name.partition(".")[2], name):
            for suffix, ending in ENDINGS:
                source = sources.get(module + ending)
                if source is not None:
                    found[suffix] = source.dtype, _of_one(suffix, source.shape)
            if module in sources:  # of all experts, unquantized
                found["weight"] = sources[module].dtype, sources[module].shape[1:]
        return found


def _pop(name: str, sources: MutableMapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """Remove a layer's tensors from `sources`: by suffix."""
    names = {suffix: tensor_name(name, suffix) for suffix in SUFFIXES}
    return {suffix: sources.pop(full) for suffix, full in names.items() if full in sources}


def _of_one(suffix: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one expert's part of a tensor, or of a tensor of one layer."""
    return shape[1:] if holds_all_experts(suffix, shape) else shape


def holds_all_experts(suffix: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == STACKED_DIMENSIONS.get(suffix)


def _check_shape(source: CheckpointTensor, shape: tuple[int, ...]) -> None:
    if source.shape != shape:
        raise ModelError(wrong_shape(source, shape))


def _scale_dtype(present: Present) -> torch.dtype | None:
    """Of the scales in the files."""
    return next((present[name][0] for name in ("scales", "weight_scale") if name in present), None)
