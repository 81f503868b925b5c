"""What the planners charge, from times measured on the device with each decode kernel.

`wavefill tune` measures them (calibrate.py) and writes them into a file under the user's cache; for
devices it has not been run on there are the values below.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from attention.planner.split_plan import EIGHTHS, SplitPlanSpec

PARTIAL_BYTES = 8  # a number of a partial result: four bytes written, and read by the combine


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Times of one decode kernel on one kind of device, its grid full."""

    read_tbs: float  # TB/s of keys and values that all programs read together
    launch_us: float  # a call that has nothing to do
    piece_us: float  # a piece, beside reading its blocks
    merge_us: float  # a call that combines anything, beside the bytes
    merge_tbs: float  # TB/s of partial results, written and read again
    rho: float  # speed of a program when few others read, against when all do

    def block_us(self, *, block: int, head_dim: int, item_bytes: int, programs: int) -> float:
        """Time of a block of `block` tokens' keys and values while all programs read."""
        return 2 * block * head_dim * item_bytes * programs / (self.read_tbs * 1e6)

    def spec(
        self,
        *,
        kv_heads: int,
        programs: int,
        group: int,
        head_dim: int,
        item_bytes: int,
        block: int,
        max_q_len: int = 1,
        window: int = 0,
    ) -> SplitPlanSpec:
        """The SplitPlanSpec of a decode grid; item_bytes: of a stored key's number; group: query
        heads
        a KV head.  Costs are rounded to eighths of a block."""
        block_us = self.block_us(
            block=block, head_dim=head_dim, item_bytes=item_bytes, programs=programs
        )
        partial_bytes = max_q_len * group * head_dim * PARTIAL_BYTES
        partial_us = partial_bytes * programs / (self.merge_tbs * 1e6)
        return SplitPlanSpec(
            kv_heads=kv_heads,
            programs=programs,
            max_q_len=max_q_len,
            window=window,
            block=block,
            work_tile_cost=round(EIGHTHS * self.piece_us / block_us),
            merge_cost=round(EIGHTHS * self.merge_us / block_us),
            merge_tile_cost=round(EIGHTHS * partial_us / block_us),
        )


# By the name that the driver gives, then by the kernel's name in dispatch.py's table.
SHIPPED = {
    "NVIDIA H100 80GB HBM3": {
        "decode": DeviceCosts(
            read_tbs=2.898, launch_us=7.65, piece_us=1.5, merge_us=0.01, merge_tbs=12.114, rho=2.49
        ),
        "decode_hopper": DeviceCosts(
            read_tbs=3.052, launch_us=2.72, piece_us=0.53, merge_us=0.05, merge_tbs=6.126, rho=2.08
        ),
    },
    # An H100's but for the memory, which copies 1.42 times as fast.
    "NVIDIA H200": {
        "decode": DeviceCosts(
            read_tbs=4.12, launch_us=7.65, piece_us=1.5, merge_us=0.01, merge_tbs=12.114, rho=2.49
        ),
        "decode_hopper": DeviceCosts(
            read_tbs=4.33, launch_us=2.72, piece_us=0.53, merge_us=0.05, merge_tbs=6.126, rho=2.08
        ),
    },
}
STANDARD = "NVIDIA H100 80GB HBM3"  # stands for devices that are not listed


def tuned_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where `wavefill tune` writes: $XDG_CACHE_HOME or ~/.cache, then wavefill/planner.json."""
    cache = environment.get("XDG_CACHE_HOME", "")
    # Not Path.home(), which fails where a container's user has no home: Triton then keeps its
    # kernels under a folder named ~, too.
    folder = Path(cache if cache.startswith("/") else os.path.expanduser("~/.cache"))
    return folder / "wavefill" / "planner.json"


def shipped_costs(device_name: str, kernel: str) -> DeviceCosts:
    """The costs that come with this version; those of an H100 for a device it does not know."""
    return SHIPPED.get(device_name, SHIPPED[STANDARD])[kernel]


def device_costs(
    device_name: str, kernel: str = "decode", *, file: Path | None = None
) -> DeviceCosts:
    """The costs of a decode kernel measured on this machine, else those shipped.

    file: tuned_file() if left out.  Raises ValueError if it is there and cannot be used.
    """
    tuned = read_tuned(tuned_file() if file is None else file)
    return tuned.get(device_name, {}).get(kernel) or shipped_costs(device_name, kernel)


def read_tuned(file: Path) -> dict[str, dict[str, DeviceCosts]]:
    """Device name -> kernel -> costs, of the file; empty if there is none."""
    try:
        return {
            name: {kernel: _checked(values) for kernel, values in kernels.items()}
            for name, kernels in json.loads(file.read_bytes()).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: not what this version's `wavefill tune` writes ({error!r}): "
            "run it again or delete the file"
        ) from None


def write_tuned(file: Path, device_name: str, costs: Mapping[str, DeviceCosts]) -> None:
    """Add a device's costs by kernel to the file; those of kernels not given stay."""
    try:
        known = read_tuned(file)
    except ValueError:  # of another version: what tuning again is for
        known = {}
    known[device_name] = known.get(device_name, {}) | dict(costs)
    text = json.dumps(
        {
            name: {kernel: asdict(values) for kernel, values in sorted(kernels.items())}
            for name, kernels in sorted(known.items())
        },
        indent=2,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    partly = file.with_suffix(f".{os.getpid()}")
    partly.write_text(text + "\n", encoding="utf-8")
    partly.replace(file)


def _checked(values: dict[str, float]) -> DeviceCosts:
    for field in fields(DeviceCosts):
        if not 0 < values[field.name] < math.inf:
            raise ValueError(f"{field.name} is {values[field.name]}")
    return DeviceCosts(**values)
