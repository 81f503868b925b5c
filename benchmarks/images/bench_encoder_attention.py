"""The attention of the image encoder by itself: our kernels, cuDNN, FlashAttention of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.encoder.seqlens import Seqlens
from attention.encoder.varlen import varlen
from attention.encoder.varlen_hopper import varlen_hopper
from attention.encoder.varlen_hopper_config import THREE_CONSUMERS, TWO_CONSUMERS

HEADS = 16
CASES = (
    (16, 4096, 72),
    (1, 4096, 72),
    (1, 16384, 72),
    (16, 256, 72),
    (1, 256, 72),
    (16, 4096, 64),
    (16, 4096, 80),
)


def milliseconds_of(run: Callable[[], object], rounds: int) -> float:
    """A call's time on the device, the median of `rounds` runs of several calls."""
    run()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began.record()
        for _ in range(5):
            run()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 5)
    return sorted(times)[rounds // 2]


def _sdpa(qkv: Tensor, images: int, backend: SDPBackend) -> Tensor:
    q, k, v = qkv.unflatten(0, (images, -1)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def subjects(qkv: Tensor, images: int) -> dict[str, Callable[[], Tensor]]:
    seqlens = Seqlens.of((len(qkv) // images,) * images, qkv.device)
    found: dict[str, Callable[[], Tensor]] = {
        "FlashAttention": partial(_sdpa, qkv, images, SDPBackend.FLASH_ATTENTION),
        "cuDNN": partial(_sdpa, qkv, images, SDPBackend.CUDNN_ATTENTION),
        "varlen": partial(varlen, qkv, seqlens),
    }
    if torch.cuda.get_device_capability()[0] == 9:
        configs = {"two": TWO_CONSUMERS, "three": THREE_CONSUMERS}
        for name, config in configs.items():
            call = partial(varlen_hopper, qkv, seqlens, config=config)
            found[f"varlen_hopper of {name}"] = call
    return found


def compare(rounds: int) -> None:
    """Print a table: milliseconds, TFLOP/s of 4 * head_dim * pairs, and the largest difference."""
    print("attention by itself, bfloat16, 16 heads: ms, TFLOP/s, largest difference from the first")
    for images, patches, head_dim in CASES:
        torch.manual_seed(1)
        shape = images * patches, 3, HEADS, head_dim
        qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        work, cells, first = 4 * images * patches**2 * HEADS * head_dim, [], None
        for name, run in subjects(qkv, images).items():
            try:
                out = run().float()
                took = milliseconds_of(run, rounds)
            except RuntimeError as error:
                cells.append(f"{name}: {str(error).splitlines()[0][:60]}")
                continue
            first = out if first is None else first
            differs = (out - first).abs().max().item()
            cells.append(f"{name} {took:.3f}, {work / took / 1e9:.0f}, {differs:.4f}")
        print(f"{images} x {patches} d{head_dim}: " + " | ".join(cells), flush=True)
