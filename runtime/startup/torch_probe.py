"""`python -m runtime.startup.torch_probe`: what PyTorch sees, as one line of JSON on stdout."""

from __future__ import annotations

import json
import warnings

import torch


def probe() -> dict[str, object]:
    """cuda: the version that this build is made for, "" for none; error: why no device is seen."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = torch.cuda.is_available()
    said = [str(each.message) for each in caught]
    error = ""
    if torch.version.cuda and not seen:
        error = said[-1] if said else "no device is visible"
    total = 0.0
    if seen:
        total = float((torch.ones(64, device="cuda") + 1).sum())  # a kernel runs
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if seen
        else [],
        "computes": total == 128.0,
        "error": " ".join(error.split())[:300],
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
