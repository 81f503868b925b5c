"""Settings for the whole suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from httpx2._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

from tests.support.examples import FULL
from tests.support.interpreter.of_processes import interpret_sooner

# Small tensors on few cores: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU the kernels run in the interpreter, chosen before they are imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# On a busy machine an answer may take long, too: 5 s are the default of a client without a timeout.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 60.0)

# On a busy machine an example may take any time: no test says anything of that.
for profile in (FULL, "fast"):
    settings.register_profile(profile, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector neither looks for cycles while modules are imported and tests are
    collected, nor later in what they left: a million objects that live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped by name where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Kernels of these tests are interpreted sooner, and with a GPU's minimum of NaN."""
    if session.items:
        interpret_sooner()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a kernel runs: on a GPU, or on a CPU by Triton's interpreter, where it was chosen."""
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=1 would interpret them")
    return request.param
