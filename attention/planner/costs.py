"""What the planners charge, from times measured on the device.

`wavefill tune` measures them (calibrate.py) and writes them into a file under the user's cache; for
devices it has not been run on there are the values below.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from attention.planner.plan import PlanSpec

EIGHTHS = 8
PARTIAL_BYTES = 8  # a number of a partial result: four bytes written, and read by the combine


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Times of the decode kernel on one kind of device, its grid full."""

    programs_per_sm: int  # what is best for head_dim 128 with up to 16 queries a KV head
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
    ) -> PlanSpec:
        """The PlanSpec of a decode grid; item_bytes: of a stored key's number; group: query heads
        a KV head.  Costs are rounded to eighths of a block."""
        block_us = self.block_us(
            block=block, head_dim=head_dim, item_bytes=item_bytes, programs=programs
        )
        partial_bytes = max_q_len * group * head_dim * PARTIAL_BYTES
        partial_us = partial_bytes * programs / (self.merge_tbs * 1e6)
        return PlanSpec(
            kv_heads=kv_heads,
            programs=programs,
            max_q_len=max_q_len,
            window=window,
            block=block,
            piece_cost=round(EIGHTHS * self.piece_us / block_us),
            merge_cost=round(EIGHTHS * self.merge_us / block_us),
            merge_piece_cost=round(EIGHTHS * partial_us / block_us),
        )


# By the name that the driver gives.
SHIPPED = {
    "NVIDIA H100 80GB HBM3": DeviceCosts(
        programs_per_sm=3,
        read_tbs=2.9,
        launch_us=3.0,
        piece_us=1.5,
        merge_us=1.0,
        merge_tbs=3.0,
        rho=2.0,
    ),
}


def tuned_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where `wavefill tune` writes: $XDG_CACHE_HOME or ~/.cache, then wavefill/planner.json."""
    cache = environment.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    return folder / "wavefill" / "planner.json"


def shipped_costs(device_name: str) -> DeviceCosts:
    """The costs that come with this version; those of an H100 for a device it does not know."""
    return SHIPPED.get(device_name, SHIPPED["NVIDIA H100 80GB HBM3"])


def device_costs(device_name: str, file: Path | None = None) -> DeviceCosts:
    """The costs measured on this machine, else those shipped.

    file: tuned_file() if left out.  Raises ValueError if it is there and cannot be used.
    """
    tuned = read_tuned(tuned_file() if file is None else file)
    return tuned.get(device_name) or shipped_costs(device_name)


def read_tuned(file: Path) -> dict[str, DeviceCosts]:
    """Device name -> costs, of the file; empty if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        return {name: _checked(values) for name, values in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: not what this version's `wavefill tune` writes ({error}): "
            "run it again or delete the file"
        ) from None


def write_tuned(file: Path, device_name: str, costs: DeviceCosts) -> None:
    """Add a device's costs to the file, or replace them."""
    try:
        known = read_tuned(file)
    except ValueError:  # of another version: what tuning again is for
        known = {}
    known[device_name] = costs
    text = json.dumps({name: asdict(values) for name, values in sorted(known.items())}, indent=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    partly = file.with_suffix(f".{os.getpid()}")
    partly.write_text(text + "\n", encoding="utf-8")
    partly.replace(file)


def _checked(values: dict[str, float]) -> DeviceCosts:
    for field in fields(DeviceCosts):
        if not values[field.name] > 0:
            raise ValueError(f"{field.name} is {values[field.name]}")
    return DeviceCosts(**values)
