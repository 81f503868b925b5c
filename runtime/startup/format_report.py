"""`python -m runtime.startup.format_report`: how a model's layers are stored, and how they run.

It reads one line of JSON (a `FormatQuery`) from stdin.  Exit code 2, with one line on stderr, if
the checkpoint cannot be served.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from model_zoo.checkpoint import Checkpoint, CheckpointTensor
from model_zoo.checkpoint_layers import CheckpointLayers, holds_all_experts
from model_zoo.config import ModelConfig, ModelError, read_config
from model_zoo.layers.gemm.implementations import capable
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.projection import LoadedProjection
from model_zoo.layers.quantized_gemm.int8.cpu import Packs, packs_of
from model_zoo.model import Model
from model_zoo.quantization.quantize import quantize_fp8
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers.registry import read
from model_zoo.quantization.readers.tensor_spec import tensor_name
from model_zoo.quantization.stored_format import StoredFormat
from model_zoo.quantization.weight_scheme import WeightScheme
from model_zoo.registry import build
from model_zoo.unsupported.message import explained
from model_zoo.weight_targets import WeightTargets, canonical_names
from runtime.config import ConfigError, EngineConfig, dtype_for
from runtime.memory_plan import size
from runtime.startup.device import DTYPES, choose_device, choose_dtype

# Codes of a layer whose error is measured: their float32 copies take 64 MiB each.
MEASURED_CODES = 1 << 24
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class FormatQuery(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    # (major, minor) of a GPU that need not be there; None: the device of this machine
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The device that the report is for."""

    name: str
    dtype: torch.dtype
    packs: Packs  # as in CheckpointLayers


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that are stored and run alike; `layers` by their names without numbers."""

    layer: str
    stored: StoredFormat | None
    runs_as: StoredFormat | None
    scheme: WeightScheme | None


def target_of(query: FormatQuery, config: ModelConfig) -> Target:
    requested = query.config
    if query.capability is not None:
        major, minor = query.capability
        name = dtype_for(
            requested.dtype,
            config.dtype,
            "cuda",
            has_bfloat16=major >= 8,
            fits_float16=config.fits_float16,
        )
        dtype = DTYPES[name]
        packs = capable(query.capability, dtype)
        return Target(f"a GPU of compute capability {major}.{minor}", dtype, packs)
    device = choose_device(requested.device)
    dtype = DTYPES[choose_dtype(requested.dtype, config, device)]
    if device.type == "cpu":
        return Target("this CPU", dtype, packs_of(device, dtype))
    packs = capable(torch.cuda.get_device_capability(device), dtype)
    return Target(torch.cuda.get_device_name(device), dtype, packs)


def report(query: FormatQuery) -> str:
    """The table as text.  Raises ConfigError or ModelError."""
    directory = Path(query.config.model)
    config = read_config(directory)
    target = target_of(query, config)
    checkpoint = Checkpoint.open(directory) if any(directory.glob("*.safetensors")) else None
    layers = CheckpointLayers.open(
        directory, checkpoint, quantization=query.config.quantization, packs=target.packs
    )
    model = build(config, target.dtype, torch.device("meta"), layers.scheme_of)
    if checkpoint is not None:
        WeightTargets(model, checkpoint, layers, directory)  # names and shapes
    formats = FormatTable(model, layers, target)
    method = layers.config.method if layers.config else "not quantized"
    lines = [f"{config.model_type}: {method}; on {target.name}, in {_name(target.dtype)}", ""]
    lines += formats.lines()
    if checkpoint is None:
        lines += ["", "no weights are in this directory: sizes are computed, errors not measured"]
    return "\n".join(lines)


class FormatTable:
    def __init__(self, model: Model, layers: CheckpointLayers, target: Target) -> None:
        self._layers, self._target, self._model = layers, target, model
        sources = layers.checkpoint.sources if layers.checkpoint else {}
        self._sources = canonical_names(sources, model)
        self._others = dict(model.other_weights())
        self._projections: dict[Kind, list[LoadedProjection]] = defaultdict(list)
        for projection in (*model.projections(), *self._experts()):
            self._projections[self._kind(projection)].append(projection)

    def _experts(self) -> Iterator[LoadedProjection]:
        """Those of experts that have tensors of their own, or quantized ones of all experts; of
        others the tensors are `others`."""
        for experts in self._model.experts():
            stacked = experts.stacked_tensors()
            if experts.names.stacked and self._is_quantized(experts):
                self._others |= {
                    name: tensor.place
                    for name, tensor in stacked.items()
                    if tensor.place is not None and not tensor.is_weight
                }
                yield from experts.projections()
            elif any(name in self._sources for name in stacked):
                self._others |= {
                    name: tensor.stack.weight if tensor.place is None else tensor.place
                    for name, tensor in stacked.items()
                }
            else:
                yield from experts.projections()

    def _is_quantized(self, experts: Experts) -> bool:
        first = next(iter(experts.projections()))
        return self._layers.stored(first.name, first.shape) is not None

    def _kind(self, projection: LoadedProjection) -> Kind:
        name, shape = projection.name, projection.shape
        return Kind(
            NUMBER.sub("*", name),
            self._layers.stored(name, shape),
            self._layers.runs_as(name, shape),
            projection.scheme,
        )

    def lines(self) -> list[str]:
        head = ("layers", "", "stored", "bytes", "runs as", "bytes", "error")
        rows = [head, *(self._row(kind, found) for kind, found in self._projections.items())]
        others = self._others.values()
        name = _name(self._target.dtype)
        rows.append(("others", str(len(others)), "", "", name, size(_bytes(others)), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        right = (1, 3, 5)
        return [
            "  ".join(
                text.rjust(width) if i in right else text.ljust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

    def _row(self, kind: Kind, projections: list[LoadedProjection]) -> tuple[str, ...]:
        first = projections[0]
        outputs, inputs = first.shape
        stored = self._stored_bytes(projections)
        parameters = (
            kind.scheme.parameters(outputs, inputs).values()
            if kind.scheme
            else [((outputs, inputs), self._target.dtype)]
        )
        runs = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parameters)
        return (
            kind.layer,
            str(len(projections)),
            self._stored_as(kind, first),
            size(stored) if stored else "",
            self._runs_as(kind, inputs),
            size(runs * len(projections)),
            self._error(kind, first),
        )

    def _found(self, projection: LoadedProjection) -> dict[str, CheckpointTensor]:
        found = self._layers.take(projection, self._sources)
        if found is None:
            return {"weight": self._sources[f"{projection.name}.weight"]}
        for suffix, source in found.items():  # which it has removed
            self._sources[tensor_name(projection.name, suffix)] = source
        return found

    def _stored_bytes(self, projections: Iterable[LoadedProjection]) -> int:
        if not self._sources:
            return 0
        found = (self._found(projection).values() for projection in projections)
        # Each tensor once, also where it is that of all experts.
        sizes = {source.name: source.num_bytes for sources in found for source in sources}
        return sum(sizes.values())

    def _stored_as(self, kind: Kind, projection: LoadedProjection) -> str:
        if kind.stored is not None:
            return str(kind.stored)
        return _name(self._found(projection)["weight"].dtype) if self._sources else ""

    def _runs_as(self, kind: Kind, inputs: int) -> str:
        if kind.scheme is not None:
            return kind.scheme.describe(inputs)
        name = _name(self._target.dtype)
        return f"{name}, dequantized when loaded" if kind.runs_as is not None else name

    def _error(self, kind: Kind, projection: LoadedProjection) -> str:
        """The root mean square of what changes, relative to that of the stored numbers."""
        if not self._sources:
            return ""
        tensors = {
            suffix: found.read()[0] if holds_all_experts(suffix, found.shape) else found.read()
            for suffix, found in self._found(projection).items()
        }
        if kind.stored is not None:
            weight = read(tensors, kind.stored, projection.shape, projection.name)
            weight = _first_rows(weight)
            exact = weight.dequantize(torch.float32)
        else:
            plain = tensors["weight"]
            plain = plain.T if projection.transposed else plain
            exact = plain[: max(1, MEASURED_CODES // plain.shape[1])].float()
            weight = None if kind.runs_as is None else quantize_fp8(exact)
        running = exact if weight is None else weight.dequantize(torch.float32)
        if kind.scheme is None or not kind.scheme.is_exact(projection.shape[1]):
            running = running.to(self._target.dtype).float()
        error = (running - exact).square().mean().sqrt()
        return f"{float(error / exact.square().mean().sqrt().clamp(min=1e-30)):.2%}"


def _first_rows(weight: QuantizedWeight) -> QuantizedWeight:
    _, end = weight.slices(MEASURED_CODES)[0]
    return weight.rows(0, end)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    query = msgspec.json.decode(sys.stdin.readline(), type=FormatQuery)
    try:
        print(report(query))
    except (ConfigError, ModelError) as error:
        print(f"error: {explained(error)}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
