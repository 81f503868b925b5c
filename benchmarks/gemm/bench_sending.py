"""A GEMM of many rows that stores its result in one place and in two, beside cuBLAS, on GPUs.

    python -m benchmarks.gemm.bench_sending --rows 512 8192
    python -m benchmarks.gemm.bench_sending --peer --piece-rows 16 32 64

For each weight [N, K] and each number of rows, microseconds (TFLOP/s) of:

  cuBLAS    into one output
  one       SendingGemm into one output, whose tiles are stored at once
  at once   into two outputs, whose tiles are stored at once
  paced R   into two outputs, whose tiles are stored in pieces of R rows while the next ones are
            multiplied

The second output is memory of the same GPU.  With --peer it is memory of the other one, and two
GPUs compute at the same time: each writes the other's memory over NVLink, and the slower one's time
is printed.  A number after TFLOP/s is GB/s that go each way.

Numbers are normal, in bf16, and there are so many weights and x that none is in the L2 cache when
it is read again.  Times are medians of CUDA graphs that are replayed in turns.  Before anything is
timed, outputs are compared with cuBLAS, and with each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gemm.together import Call, TogetherTimer
from model_zoo.layers.gemm.sending import SendingGemm
from model_zoo.layers.gemm.timing import COLD_BYTES

SHAPES = ((4096, 2048), (4096, 6144), (8192, 4096), (8192, 14336))  # N, K
ROWS = (1024, 2048, 4096, 8192)
BF16 = torch.bfloat16


def subjects(piece_rows: Sequence[int]) -> dict[str, SendingGemm | None]:
    """What is timed, by name; None: cuBLAS.  All but two have two outputs."""
    paced = {f"paced {rows}": SendingGemm(piece_rows=rows) for rows in piece_rows}
    at_once = SendingGemm(paced=False)
    return {"cuBLAS": None, "one": at_once, "at once": at_once} | paced


def sends(name: str) -> bool:
    return name not in ("cuBLAS", "one")


@dataclass(frozen=True, slots=True)
class Operands:
    """Of a GPU's GEMMs of a weight's shape and a number of rows."""

    weights: Sequence[Tensor]  # [N, K]
    rows: Sequence[Tensor]  # [M, K], as many
    out: Tensor  # [M, N]
    other: Tensor  # [M, N], maybe of another GPU

    def call(self, name: str, gemm: SendingGemm | None) -> Call:
        outs = [self.out, self.other] if sends(name) else [self.out]

        def run(i: int) -> None:
            if gemm is None:
                torch.mm(self.rows[i], self.weights[i].T, out=self.out)
            else:
                gemm.run_into(self.rows[i], self.weights[i], outs)

        return run


def operands(
    rows: int, outputs: int, inputs: int, device: torch.device, other: torch.device
) -> Operands:
    """Random numbers, of which products are near 1; other: where the second output is."""
    sets = max(3, -(-COLD_BYTES // (2 * (rows + outputs) * inputs)))

    def normal(height: int, factor: float) -> Tensor:
        return torch.randn(height, inputs, device=device, dtype=BF16).mul_(factor)

    return Operands(
        [normal(outputs, inputs**-0.5) for _ in range(sets)],
        [normal(rows, 1.0) for _ in range(sets)],
        torch.empty(rows, outputs, device=device, dtype=BF16),
        torch.empty(rows, outputs, device=other, dtype=BF16),
    )


def check(given: Operands, named: dict[str, SendingGemm | None]) -> None:
    """That outputs are equal, near what cuBLAS computes, and without -0.0."""
    with torch.cuda.device(given.out.device):
        given.call("cuBLAS", None)(0)
        expected = given.out.clone()
        for name, gemm in named.items():
            if sends(name):
                _check_call(given, given.call(name, gemm), expected)


def _check_call(given: Operands, call: Call, expected: Tensor) -> None:
    given.out.fill_(float("nan"))
    given.other.fill_(float("nan"))
    torch.cuda.synchronize(given.other.device)
    call(0)
    torch.cuda.synchronize()
    assert torch.equal(given.out, given.other.to(given.out.device)), "outputs differ"
    torch.testing.assert_close(given.out, expected, rtol=0.02, atol=0.02)
    assert not bool(((given.out == 0) & given.out.signbit()).any()), "-0.0"


def connect(first: torch.device, second: torch.device) -> None:
    """Let each GPU write the other's memory: a copy of PyTorch's does that once a process."""
    for sender, receiver in ((first, second), (second, first)):
        assert torch.cuda.can_device_access_peer(sender, receiver), f"{sender}, {receiver}"
        torch.ones(1, device=sender).to(receiver)
    for each in (first, second):
        torch.cuda.synchronize(each)


def cell(name: str, us: float, given: Operands) -> str:
    (outputs, inputs), rows = given.weights[0].shape, len(given.out)
    written = f"{us:.1f} ({2 * rows * outputs * inputs / us / 1e6:.0f})"
    if sends(name) and given.other.device != given.out.device:
        written += f" {2 * rows * outputs / us / 1e3:4.0f}"
    return f"{written:>20}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--piece-rows", type=int, nargs="+", default=[32])
    parser.add_argument("--replays", type=int, default=15, help="of each graph")
    parser.add_argument("--peer", action="store_true", help="two GPUs write each other's memory")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    devices = [torch.device("cuda", i) for i in range(2 if arguments.peer else 1)]
    if arguments.peer:
        connect(devices[0], devices[1])
    timer = TogetherTimer(devices, arguments.replays)
    named = subjects(arguments.piece_rows)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print(f"{'N':>6} {'K':>6} {'rows':>6}" + "".join(f"{name:>20}" for name in named))
    for outputs, inputs in SHAPES:
        for rows in arguments.rows:
            given = [
                operands(rows, outputs, inputs, device, other)
                for device, other in zip(devices, reversed(devices), strict=True)
            ]
            for each in given:
                check(each, named)
            graphs = [
                timer.capture([each.call(name, gemm) for each in given], len(given[0].rows))
                for name, gemm in named.items()
            ]
            times = zip(named, timer.replay(graphs), strict=True)
            cells = "".join(cell(name, us, given[0]) for name, us in times)
            print(f"{outputs:>6} {inputs:>6} {rows:>6}{cells}", flush=True)


if __name__ == "__main__":
    main()
