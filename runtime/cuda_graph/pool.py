"""GraphPool: the memory that CUDA graphs share, since only one of them runs at a time.

The largest is captured first, and the others reuse its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Alias:
    """The memory of a tensor, for another tensor that does not own it."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def alias(tensor: Tensor) -> Tensor:
    """An output of a graph, whose memory the pool may give to the next graphs: valid until the next
    replay of any."""
    flat = torch.as_tensor(Alias(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)


class GraphPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture what `run` queues -> the graph, and what it returned.

        Raises RuntimeError if memory runs out or an operation cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                with suppress(RuntimeError):  # the graph is incomplete
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, outputs

    def renew(self) -> None:
        """Begin with no memory, after all graphs were dropped."""
        self._pool = torch.cuda.graph_pool_handle()
