"""PyTorch and the Triton compiler, each tried in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from server.cli.doctor.check import Result, output_of
from server.cli.doctor.gpu import Gpus

TORCH_PROBE = (sys.executable, "-P", "-m", "runtime.startup.torch_probe")
COMPILER_PROBE = (sys.executable, "-P", "-m", "runtime.precompile.compiler_probe")
ANY_CAPABILITY = (9, 0)  # where there is no GPU to ask


def torch(gpus: Gpus, deadline: float) -> Result:
    code, out, err = output_of(TORCH_PROBE, deadline)
    has_gpu = bool(gpus.get(deadline))
    if code:
        return Result("fail", last_line(err) or f"exit code {code}", _reinstall(err))
    found = json.loads(out.splitlines()[-1])
    text = f"{found['torch']}, " + (f"CUDA {found['cuda']}" if found["cuda"] else "for CPUs only")
    if found["devices"]:
        if not found["computes"]:
            return Result("fail", f"{text}: a GPU adds numbers wrongly", "restart; check the GPU")
        return Result("pass", f"{text}, sees {len(found['devices'])} GPUs")
    if not has_gpu:
        return Result("pass", text)
    if not found["cuda"]:
        return Result(
            "fail",
            f"{text}: it cannot use the GPU",
            "install the build with CUDA: pip install --force-reinstall torch, without an index "
            "of CPU builds",
        )
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        return Result("fail", f"{text}: sees no GPU", f"CUDA_VISIBLE_DEVICES is {visible!r}")
    return Result(
        "fail",
        f"{text}: sees no GPU ({found['error']})",
        f"update the NVIDIA driver to one for CUDA {found['cuda']}",
    )


def triton(gpus: Gpus, deadline: float) -> Result:
    """Without a GPU no kernel is compiled, so nothing can be wrong."""
    found = gpus.get(deadline)
    capability = found[0].capability if found else ANY_CAPABILITY
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        code, out, err = output_of(
            (*COMPILER_PROBE, *map(str, capability)), deadline, env=environment
        )
    except subprocess.TimeoutExpired:
        if not found:
            return Result("pass", "no answer in time; not needed on a CPU")
        raise
    target = f"for compute capability {capability[0]}.{capability[1]}"
    if code == 0:
        version = json.loads(out.splitlines()[-1])["triton"]
        return Result("pass", f"{version} compiles {target}")
    reason = last_line(err) or f"exit code {code}"
    if not found:
        return Result("pass", f"does not compile ({reason}); not needed on a CPU")
    return Result("fail", reason, _reinstall(err))


def _reinstall(err: str) -> str:
    if "C compiler" in err or "CalledProcessError" in err or "Python.h" in err:
        return "install a C compiler and the headers of Python (Debian: gcc python3-dev), or set CC"
    return "install again: pip install --force-reinstall wavefill"


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else ""
