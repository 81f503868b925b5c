"""DeviceCosts: the cost model of the split planners, measured per GPU and decode kernel.

`wavefill tune` measures it (tuning.py) and writes a file under the user's cache; devices without an
entry there use the values below.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from attention.backend import UnsupportedAttention
from attention.planner.split_plan import EIGHTHS, SplitPlanSpec

MAX_COST = 1e4  # of any cost: plans count in int32
PARTIAL_BYTES = 8  # per element of a partial result: four bytes written, and read by the combine


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Times of one decode kernel on one GPU model with a full grid."""

    read_tbs: float  # TB/s of keys and values that all programs read together
    launch_us: float  # an empty call
    piece_us: float  # fixed cost of a work tile, without reading its blocks
    merge_us: float  # fixed cost of a combine, without its bytes
    merge_tbs: float  # TB/s of partial results, written and read again
    rho: float  # a program's read speed when few others read, relative to when all do

    def block_us(self, *, block: int, head_dim: int, item_bytes: int, programs: int) -> float:
        """Time to read the keys and values of `block` tokens while all programs read."""
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
        """The SplitPlanSpec of a decode grid, costs rounded to eighths of a block.

        item_bytes: of a stored element of K or V; group: query heads per KV head
        """
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


# By the GPU's name as the driver reports it, then by the kernel's name in dispatch.py's table.
SHIPPED = {
    "NVIDIA H100 80GB HBM3": {
        "decode": DeviceCosts(
            read_tbs=2.898, launch_us=7.65, piece_us=1.5, merge_us=0.01, merge_tbs=12.114, rho=2.49
        ),
        "decode_hopper": DeviceCosts(
            read_tbs=3.052, launch_us=2.72, piece_us=0.53, merge_us=0.05, merge_tbs=6.126, rho=2.08
        ),
    },
    "NVIDIA H200": {
        "decode": DeviceCosts(
            read_tbs=4.21, launch_us=6.87, piece_us=2.33, merge_us=0.01, merge_tbs=14.182, rho=1.7
        ),
        "decode_hopper": DeviceCosts(
            read_tbs=4.343, launch_us=2.71, piece_us=0.59, merge_us=0.16, merge_tbs=6.922, rho=1.42
        ),
    },
}
STANDARD = "NVIDIA H100 80GB HBM3"  # used for devices that are not listed


def tuned_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where `wavefill tune` writes: $XDG_CACHE_HOME or ~/.cache, then wavefill/planner.json."""
    cache = environment.get("XDG_CACHE_HOME", "")
    # Not Path.home(), which raises where a container's user has no home: Triton then also keeps
    # its kernels under a folder named ~.
    folder = Path(cache if cache.startswith("/") else os.path.expanduser("~/.cache"))
    return folder / "wavefill" / "planner.json"


def shipped_costs(device_name: str, kernel: str) -> DeviceCosts:
    """The built-in costs; those of an H100 for an unlisted device."""
    return SHIPPED.get(device_name, SHIPPED[STANDARD])[kernel]


def device_costs(
    device_name: str, kernel: str = "decode", *, file: Path | None = None
) -> DeviceCosts:
    """The costs of a decode kernel measured on this machine, else those shipped.

    file: tuned_file() if None.  Raises UnsupportedAttention as read_tuned.
    """
    tuned = read_tuned(tuned_file() if file is None else file)
    return tuned.get(device_name, {}).get(kernel) or shipped_costs(device_name, kernel)


def read_tuned(file: Path) -> dict[str, dict[str, DeviceCosts]]:
    """The file as device name -> kernel -> costs; empty if it does not exist.

    Raises UnsupportedAttention, with the place and the remedy, if it cannot be read or is damaged.
    """
    try:
        devices = _object(json.loads(file.read_bytes()), "the file")
        return {
            name: {
                kernel: _checked(values, f"{name}, {kernel}")
                for kernel, values in _object(kernels, name).items()
            }
            for name, kernels in devices.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # JSON's are ValueErrors
        raise UnsupportedAttention(
            f"{file}: not what this version's `wavefill tune` writes ({error}): "
            "run it again or delete the file"
        ) from None


def write_tuned(file: Path, device_name: str, costs: Mapping[str, DeviceCosts]) -> None:
    """Merge a device's costs by kernel into the file; other kernels' entries stay."""
    try:
        known = read_tuned(file)
    except UnsupportedAttention:  # of another version: overwritten
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
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(file)


def _checked(values: Any, place: str) -> DeviceCosts:
    names, found = {field.name for field in fields(DeviceCosts)}, _object(values, place)
    for problem, wrong in (("lacks", names - found.keys()), ("has", found.keys() - names)):
        if wrong:
            raise ValueError(f"{place} {problem} {', '.join(sorted(wrong))}")
    for name, value in found.items():
        if type(value) not in (int, float) or not 0 < value < MAX_COST:
            limits = f"from 0 to {MAX_COST:.0f}"
            raise ValueError(f"{name} of {place} is {value!r}, not a number {limits}")
    return DeviceCosts(**found)


def _object(values: Any, place: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{place} is no JSON object")
    return values
