"""The choices of earlier starts: a file under the user's cache."""

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

import torch
import triton

from attention.planner.costs import tuned_file
from model_zoo.layers.gemm.implementations import CublasGemm, GemmImpl, SkinnyGemm, SplitK
from model_zoo.layers.gemm.swiglu import SwigluGemm, UnfusedSwiglu

KINDS: dict[str, type[GemmImpl]] = {
    kind.__name__: kind for kind in (CublasGemm, SplitK, SkinnyGemm, UnfusedSwiglu, SwigluGemm)
}
Choices = dict[str, GemmImpl]  # by shape, type and rows, as choose.py names them
Written = dict[str, dict[str, str | int]]  # Choices in the file
LAYERS = Path(__file__).parents[1]
# Beside this folder: what a layer does with a product, and what products are timed beside.
OTHERS = ("linear.py", "kernels/silu_mul.py", "kernels/add_rms_norm.py")
KERNELS = LAYERS.parents[1] / "attention" / "common"
SHARED = ("hopper.py", "dependent_launch.py")  # with those of attention
LOCK_SECONDS, LOCK_POLL_SECONDS = 2.0, 0.01  # another server has it for milliseconds
log = logging.getLogger(__name__)


def chosen_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Beside what `wavefill tune` writes."""
    return tuned_file(environment).with_name("products.json")


@cache
def environment_key(device: torch.device) -> str:
    """What choices depend on: the GPU, the libraries, and the source of what is timed."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return f"{torch.cuda.get_device_name(device)}, {versions}, {digest(sources())}"


def sources() -> list[Path]:
    """All that decides how long a product takes."""
    here = sorted(Path(__file__).parent.glob("*.py"))
    return [*here, *(LAYERS / name for name in OTHERS), *(KERNELS / name for name in SHARED)]


def digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def read_choices(file: Path, environment_key: str) -> Choices:
    """Those made under the same circumstances; none, and a line in the log, if it is damaged."""
    made = _read(file).get(environment_key, {})
    try:
        return {gemm_key: _decoded(values) for gemm_key, values in made.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _ignore(file, error)
        return {}


def write_choices(file: Path, environment_key: str, choices: Choices) -> None:
    """Add choices to the file, to which other servers may add theirs at the same time.

    Those of the same GPU under other circumstances go.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.parent):
            text = json.dumps(_merged(file, environment_key, choices), indent=1, sort_keys=True)
            partly = file.with_suffix(f".{os.getpid()}")
            partly.write_text(text + "\n", encoding="utf-8")
            partly.replace(file)
    except OSError as error:
        log.warning("choices of matrix products are not kept: %s", error)


def _merged(file: Path, environment_key: str, choices: Choices) -> dict[str, Written]:
    """What the file holds, and these."""
    gpu = environment_key.split(",")[0]
    known = {name: made for name, made in _read(file).items() if name.split(",")[0] != gpu}
    made = read_choices(file, environment_key) | choices
    known[environment_key] = {gemm_key: _encoded(gemm) for gemm_key, gemm in made.items()}
    return known


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other server is in here.  Where that cannot be had, we go on: a choice may be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _lock(descriptor) and time.monotonic() < deadline:
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)  # which frees the lock


def _lock(descriptor: int) -> bool:
    """False if somebody else has it.  A file system without locks counts as locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _read(file: Path) -> dict[str, Written]:
    """By circumstances.  What other versions wrote is not for us to understand."""
    try:
        return dict(json.loads(file.read_bytes()).items())
    except FileNotFoundError:
        return {}
    except (OSError, AttributeError, ValueError) as error:
        _ignore(file, error)
        return {}


def _ignore(file: Path, error: Exception) -> None:
    log.warning("%s: ignored, for it is damaged (%r): products are timed again", file, error)


def _encoded(gemm: GemmImpl) -> dict[str, str | int]:
    return {"kind": type(gemm).__name__, **asdict(gemm)}


def _decoded(values: dict[str, str | int]) -> GemmImpl:
    numbers = {name: value for name, value in values.items() if name != "kind"}
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}")
    return KINDS[str(values["kind"])](**numbers)
