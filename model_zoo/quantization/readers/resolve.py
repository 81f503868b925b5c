"""resolve: how a Linear is stored, by the config's lists and by the tensors that are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from model_zoo.json_fields import ModelError
from model_zoo.quantization.quantization_config import QuantizationConfig
from model_zoo.quantization.readers.registry import check, problem, specs
from model_zoo.quantization.readers.tensor_spec import FLOATS, Present
from model_zoo.quantization.stored_format import StoredFormat, fp8_format

WEIGHT = "weight"
PLAIN = (*FLOATS, torch.float64)
FP8 = (fp8_format("block", (128, 128)), fp8_format("channel"), fp8_format("tensor"))


def resolve(
    name: str, shape: tuple[int, int], config: QuantizationConfig | None, present: Present
) -> StoredFormat | None:
    """How the Linear `name` with a weight of `shape`, [N, K], is stored; None: not quantized.

    present: the tensors that the files have of it, by suffix.  They decide where the lists of the
    config say something else: lists name modules by other names at times, or too few of them.
    Raises ModelError if the tensors make no weight.
    """
    if present.get(WEIGHT, (None,))[0] in PLAIN:
        return None
    found = [
        stored
        for stored in dict.fromkeys(_candidates(name, config))
        if _has_codes(stored, shape, present)
    ]
    for stored in found:
        if problem(name, shape, stored, present) is None:
            return stored
    if found:
        check(name, shape, found[0], present)
    stored = config.stored(name) if config else None
    if stored is not None and WEIGHT not in present:
        check(name, shape, stored, present)
    if WEIGHT not in present:
        raise ModelError(f"{name}.{WEIGHT} is missing: the download is not complete")
    raise ModelError(
        f"{name}.{WEIGHT} is {str(present[WEIGHT][0]).removeprefix('torch.')}, which the "
        "quantization_config of config.json does not explain: download it again"
    )


def _candidates(name: str, config: QuantizationConfig | None) -> Iterator[StoredFormat]:
    """What the lists say, the same with another number of scales, then all that occurs."""
    listed = config.stored(name) if config else None
    formats = [*([listed] if listed else []), *(config.formats() if config else ())]
    for stored in formats:
        yield stored
        if stored.name == "int-quantized":
            yield replace(stored, strategy="channel")
            yield replace(stored, strategy="tensor")
        if stored.name == "fp8":
            yield from FP8
    yield from FP8


def _has_codes(stored: StoredFormat, shape: tuple[int, int], present: Present) -> bool:
    spec = specs(stored, shape)[0]
    suffix = spec.find(present)
    return suffix is not None and present[suffix][0] in spec.dtypes
