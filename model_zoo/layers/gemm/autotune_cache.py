"""The autotune cache: a file of choices under the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import triton

from attention.planner.costs import tuned_file
from model_zoo.layers.gemm.implementations import CublasGemm, GemmImpl, SkinnyGemm, SplitK
from model_zoo.layers.gemm.swiglu import SwigluGemm, UnfusedSwiglu
from model_zoo.layers.moe.hopper.tiles import HopperTiles
from model_zoo.layers.moe.tiles import ExpertTiles
from model_zoo.layers.quantized_gemm.dequant_gemm import (
    DequantizeInRegisters,
    DequantizeInRegistersUnsplit,
)
from model_zoo.layers.quantized_gemm.fp8.many_rows import Fp8ManyRowsGemm
from model_zoo.layers.quantized_gemm.fp8.skinny import SkinnyFp8Gemm
from model_zoo.layers.quantized_gemm.fp8_gemm import (
    DequantizeThenCublas,
    ScaledMM,
    UnscaledMM,
)
from model_zoo.layers.quantized_gemm.int8.gemm import Int8Gemm
from model_zoo.layers.quantized_gemm.packed_many_rows import PackedManyRowsGemm
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm

Choice = GemmImpl | ExpertTiles | HopperTiles
KINDS: dict[str, type[Choice]] = {
    kind.__name__: kind
    for kind in (
        *(CublasGemm, SplitK, SkinnyGemm, UnfusedSwiglu, SwigluGemm),
        *(DequantizeInRegisters, DequantizeInRegistersUnsplit, DequantizeThenCublas),
        *(ScaledMM, UnscaledMM, Fp8ManyRowsGemm, PackedManyRowsGemm),
        *(SkinnyQuantizedGemm, SkinnyFp8Gemm, Int8Gemm),
        *(ExpertTiles, HopperTiles),
    )
}
Choices = dict[str, Any]  # by str(GemmKey) or str(ExpertsKey), of the kind that it asks for
Written = dict[str, dict[str, str | int]]  # Choices in the file
LAYERS = Path(__file__).parents[1]
# Outside this folder: how layers use GEMMs, and the kernels that run between them when timed.
OTHERS = ("linear.py", "swiglu_linear.py", "quantized_rows.py", "norm.py", "normed_rows.py")
OTHERS += ("kernels/silu_mul.py", "kernels/add_rms_norm.py", "kernels/hold.py")
OTHERS += ("row_parallel.py", "all_reduce/symmetric_buffers.py")
# Of what kernels import: device functions shared with attention kernels, and constants.
SHARED = ("hopper.py", "dependent_launch.py", "softmax.py", "tma_rows.py")
CONSTANTS = ("moe_config.py", "quantization/quantized_weight.py", "quantization/weight_scheme.py")
LOCK_SECONDS, LOCK_POLL_SECONDS = 2.0, 0.01  # a server holds it for milliseconds
log = logging.getLogger(__name__)


def chosen_file(environment: Mapping[str, str] = os.environ) -> Path:
    """products.json in the folder of `wavefill tune`'s file."""
    return tuned_file(environment).with_name("products.json")


@cache
def environment_key(device: torch.device) -> str:
    """The validity of choices: GPU, library versions, and a digest of the timed sources."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return f"{torch.cuda.get_device_name(device)}, {versions}, {digest(sources())}"


def sources() -> list[Path]:
    """The source files that a GEMM's time depends on."""
    folders = (LAYERS / name for name in ("gemm", "quantized_gemm", "moe"))
    found = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    model_zoo = LAYERS.parent
    common = model_zoo.parent / "attention" / "common"
    for folder, names in ((LAYERS, OTHERS), (common, SHARED), (model_zoo, CONSTANTS)):
        found += [folder / name for name in names]
    return found


def digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def read_choices(file: Path, environment_key: str) -> Choices:
    """The file's choices for this environment; none, with a warning, for a damaged file."""
    made = _read(file).get(environment_key, {})
    try:
        return {gemm_key: _decoded(values) for gemm_key, values in made.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _ignore(file, error)
        return {}


def write_choices(file: Path, environment_key: str, choices: Choices) -> None:
    """Merge choices into the file, which other servers may write concurrently.

    Choices of the same GPU in other environments are dropped.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.parent):
            text = json.dumps(_merged(file, environment_key, choices), indent=1, sort_keys=True)
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(file)
    except OSError as error:
        log.warning("choices of GEMMs are not kept: %s", error)


def _merged(file: Path, environment_key: str, choices: Choices) -> dict[str, Written]:
    """The file's contents with these choices."""
    gpu = environment_key.split(",")[0]
    known = {name: made for name, made in _read(file).items() if name.split(",")[0] != gpu}
    made = read_choices(file, environment_key) | choices
    known[environment_key] = {gemm_key: _encoded(gemm) for gemm_key, gemm in made.items()}
    return known


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; after LOCK_SECONDS go on without it, and a choice may be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _lock(descriptor) and time.monotonic() < deadline:
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)  # which frees the lock


def _lock(descriptor: int) -> bool:
    """False if another process holds it.  A file system without locks counts as locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _read(file: Path) -> dict[str, Written]:
    """The file by environment key; entries of other environments are not parsed."""
    try:
        return dict(json.loads(file.read_bytes()).items())
    except FileNotFoundError:
        return {}
    except (OSError, AttributeError, ValueError) as error:
        _ignore(file, error)
        return {}


def _ignore(file: Path, error: Exception) -> None:
    log.warning("%s: ignored, for it is damaged (%r): GEMMs are timed again", file, error)


def _encoded(gemm: Any) -> dict[str, str | int]:
    return {"gemm": type(gemm).__name__, **asdict(gemm)}


def _decoded(values: dict[str, str | int]) -> Choice:
    kind = KINDS[str(values["gemm"])]
    given = {name: value for name, value in values.items() if name != "gemm"}
    gemm = kind(**given)
    for name, hint in get_type_hints(kind).items():
        value, choices = getattr(gemm, name), get_args(hint)
        if value not in choices if choices else type(value) is not hint or value < 0:
            raise ValueError(f"{name} is {value!r}")
    return gemm
