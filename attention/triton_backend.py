"""The back ends that run Triton kernels: flash2, planned, and flash1, to compare it with.

Nothing here depends on a length: buffers are sized by the largest step, counts that the host knows
anyway decide which kernels run, and all lengths are read on the device.  So a CUDA graph may hold a
step from plan to attend, and replay it with other lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.backend import Capacity, Choice, Shape, UnsupportedAttention
from attention.kernels.decode import decode, decode_config
from attention.kernels.flash1 import flash1
from attention.kernels.prefill import prefill, prefill_config
from attention.kernels.write_kv import write_kv
from attention.kv_pool import KVPool
from attention.metadata import ForwardMeta
from attention.planner.costs import device_costs
from attention.planner.device import DevicePlanner
from attention.planner.device_tiles import DeviceTiler
from attention.planner.plan import PlanSpec, SplitPlan
from attention.planner.tiles import TilePlan, TileSpec

INTERPRETED_SMS = 4  # of the interpreter, which runs one program after the other
MAX_DECODE_TOKENS = 1  # a row that feeds more is a prompt


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's plans by window; empty where no row needs the kernel."""

    decode: dict[int, SplitPlan]
    prefill: dict[int, TilePlan]


@dataclass(frozen=True, slots=True)
class Tile:
    """What a kernel wants of its plan."""

    block_m: int  # packed query rows
    block_n: int  # KV positions
    resident: int  # programs that fit on an SM


class Flash1Backend:
    name = "flash1"
    details = "flash1 for all rows"

    def plan(self, meta: ForwardMeta, kv: KVPool) -> ForwardMeta:
        """Nothing to prepare: each program finds its row."""
        return meta

    def write(self, k: Tensor, v: Tensor, kv: KVPool, layer: int, meta: ForwardMeta) -> None:
        """As Backend.write; a negative slot is skipped."""
        write_kv(k, v, kv.k[layer], kv.v[layer], meta.write_slots, *kv.scales(layer))

    def attend(
        self,
        q: Tensor,
        kv: KVPool,
        layer: int,
        meta: ForwardMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """As Backend.attend; what belongs to tokens of no row is undefined."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_scale, v_scale = kv.scales(layer)
        flash1(
            q, kv.k[layer], kv.v[layer], meta.page_table, meta.cu_seqlens_q, meta.cache_seqlens,
            out, lse, scale=scale, window=window, softcap=softcap, sinks=sinks,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return out


class TritonBackend:
    """flash2: FlashAttention-2 for prompts, planned split-KV attention for rows that decode."""

    name = "flash2"

    def __init__(
        self,
        choice: Choice,
        shape: Shape,
        capacity: Capacity,
        device: torch.device,
        *,
        windows: tuple[int, ...] = (0,),
        max_decode_tokens: int = MAX_DECODE_TOKENS,
    ) -> None:
        """Takes the memory for plans and partial results; arguments as in `build`."""
        self._decode, decode_tile = _decode_kernel(choice.decode, shape, max_decode_tokens)
        self._prefill, prefill_tile = _prefill_kernel(choice.prefill, shape)
        self.details = f"{choice.decode} split by {choice.planner}, {choice.prefill}"
        self._capacity = capacity
        self._max_decode_tokens = max_decode_tokens
        try:
            self._planners = {
                window: DevicePlanner(
                    _decode_spec(shape, decode_tile, device, window, max_decode_tokens),
                    choice.planner,
                    max_rows=capacity.rows,
                    group=shape.group,
                    head_dim=shape.head_dim,
                    device=device,
                )
                for window in windows
            }
        except ValueError as error:  # an unknown planner, or a file of costs that is damaged
            raise UnsupportedAttention(f"--split-planner: {error}") from None
        self._tilers = {
            window: DeviceTiler(
                _tile_spec(shape, prefill_tile, device, window, max_decode_tokens),
                max_tokens=capacity.tokens,
                max_rows=capacity.rows,
                head_dim=shape.head_dim,
                device=device,
            )
            for window in windows
        }

    def plan(self, meta: ForwardMeta, kv: KVPool) -> ForwardMeta:
        """Queue the planners of the kernels that the step needs, one launch for each window.

        Raises ValueError if the step is larger than the back end was made for.
        """
        rows, tokens = meta.num_rows, len(meta.write_slots)
        if rows > self._capacity.rows or tokens > self._capacity.tokens:
            raise ValueError(
                f"a step of {rows} rows and {tokens} tokens, and the attention back end was made "
                f"for {self._capacity.rows} and {self._capacity.tokens}"
            )
        lengths = meta.cu_seqlens_q, meta.cache_seqlens
        plan = TritonPlan({}, {})
        if meta.decode_rows or min(meta.q_lens, default=0) <= self._max_decode_tokens:
            plan.decode.update((w, planner.plan(*lengths)) for w, planner in self._planners.items())
        if meta.max_seqlen_q > self._max_decode_tokens:
            plan.prefill.update((w, tiler.plan(*lengths)) for w, tiler in self._tilers.items())
        return replace(meta, plan=plan)

    def write(self, k: Tensor, v: Tensor, kv: KVPool, layer: int, meta: ForwardMeta) -> None:
        """As Backend.write; a negative slot is skipped."""
        write_kv(k, v, kv.k[layer], kv.v[layer], meta.write_slots, *kv.scales(layer))

    def attend(
        self,
        q: Tensor,
        kv: KVPool,
        layer: int,
        meta: ForwardMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """As Backend.attend; what belongs to tokens of no row is undefined."""
        plan = meta.plan
        assert isinstance(plan, TritonPlan), "plan() comes first"
        if window not in self._planners:
            raise UnsupportedAttention(
                f"a window of {window} positions: this back end plans {sorted(self._planners)}: "
                "name all windows of the model when it is made"
            )
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_scale, v_scale = kv.scales(layer)
        tensors = q, kv.k[layer], kv.v[layer], meta.page_table
        options = {
            "scale": scale, "softcap": softcap, "sinks": sinks,
            "k_scale": k_scale, "v_scale": v_scale,
        }  # fmt: skip
        if window in plan.decode:
            self._decode(*tensors, plan.decode[window], out, lse, **options)
        if window in plan.prefill:
            self._prefill(*tensors, plan.prefill[window], out, lse, **options)
        return out


def _decode_kernel(name: str, shape: Shape, max_q_len: int) -> tuple[Callable[..., None], Tile]:
    """The table's kernel for rows that decode, and the tiles that it wants."""
    queries = shape.group * max_q_len
    if name == "decode_hopper":
        from attention.kernels.decode_hopper import decode_hopper, hopper_decode_config

        return decode_hopper, Tile(
            queries, hopper_decode_config(shape.head_dim, queries).block_n, 1
        )
    config = decode_config(shape.head_dim, shape.dtype, queries, shape.kv_dtype)
    return decode, Tile(queries, config.block_n, config.resident)


def _decode_spec(
    shape: Shape, tile: Tile, device: torch.device, window: int, max_q_len: int
) -> PlanSpec:
    name, sms = _device(device)
    return device_costs(name).spec(
        kv_heads=shape.kv_heads,
        programs=sms * tile.resident,
        group=shape.group,
        head_dim=shape.head_dim,
        item_bytes=shape.kv_dtype.itemsize,
        block=tile.block_n,
        max_q_len=max_q_len,
        window=window,
    )


def _prefill_kernel(name: str, shape: Shape) -> tuple[Callable[..., None], Tile]:
    """The table's kernel for prompts, and the tiles that it wants."""
    if name == "prefill_hopper":
        from attention.kernels.prefill_hopper import hopper_config, prefill_hopper

        return prefill_hopper, Tile(128, hopper_config(shape.head_dim).block_n, 1)
    config = prefill_config(shape.head_dim, shape.dtype)
    return prefill, Tile(config.block_m, config.block_n, config.resident)


def _tile_spec(
    shape: Shape, tile: Tile, device: torch.device, window: int, max_q_len: int
) -> TileSpec:
    return TileSpec(
        kv_heads=shape.kv_heads,
        group=shape.group,
        programs=_device(device)[1] * tile.resident,
        min_q_len=max_q_len + 1,
        window=window,
        block_m=tile.block_m,
        block_n=tile.block_n,
    )


def _device(device: torch.device) -> tuple[str, int]:
    """Name and number of multiprocessors."""
    if device.type != "cuda":
        return "interpreter", INTERPRETED_SMS
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
