"""EncoderGraphs: the image encoder, which replays a CUDA graph where the host would be too slow.

The host takes about as long to launch the encoder for a small image as for a large one, and the
device is done sooner.  Small images are padded to a few sizes, so that each has a graph of all
stages.  They are padded whether it is captured yet or not: the same kernels run on the same shapes,
so that no bit of an image's features depends on that, on this rank or another, or when the image
is encoded once more.

Sizes are the multiples of the rows of a GEMM's tile, which would be computed in any case: to pad
takes no time worth naming, and eight graphs serve images of up to MAX_ROWS patches.  Larger images
are not padded, and are encoded over several steps where rows decode beside them.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.encoder.seqlens import Seqlens
from model_zoo.vision.encoder import Encoding, VisionEncoder
from model_zoo.vision.vision_config import VisionConfig
from runtime.cuda_graph.buckets import TILE
from runtime.cuda_graph.pool import GraphPool, alias
from runtime.startup.device import free_bytes, is_out_of_memory

# Patches.  A graph cannot be cut, and rows that decode wait for all of it, which takes a few ms.
MAX_ROWS = 1024

log = logging.getLogger("wavefill.graphs")


def graph_rows(vision: VisionConfig, max_pixels: int) -> tuple[int, ...]:
    """What the patches of images are padded to, ascending; max_pixels: of the largest image."""
    tile = math.lcm(TILE, vision.merge_size**2)
    patches = max(max_pixels // vision.patch_size**2, 1)
    return tuple(range(tile, min(patches + tile - 1, MAX_ROWS) + 1, tile))


@dataclass(frozen=True, slots=True)
class CapturedEncoder:
    graph: torch.cuda.CUDAGraph
    features: Tensor  # [rows / square, 1 + deepstack, out], an alias


class EncoderGraphs:
    """An Encoder (runtime/executor/images.py).  Its attention has to read lengths on the device."""

    def __init__(self, encoder: VisionEncoder, rows: Sequence[int], device: torch.device) -> None:
        """rows: as graph_rows"""
        self._encoder, self._rows, self._device = encoder, rows, device
        self.captured: dict[int, CapturedEncoder] = {}  # by rows
        self._uncaptured = list(rows)
        # What a graph reads: those of fewer rows use the front.
        hidden, head_dim = encoder.config.hidden_size, encoder.config.head_dim
        self._x = torch.zeros(rows[-1], hidden, dtype=encoder.dtype, device=device)
        self._cos_sin = torch.zeros(rows[-1], head_dim, dtype=torch.float32, device=device)
        self._cu_seqlens = torch.zeros(2, dtype=torch.int32, device=device)

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Of a token's features: 1 + deepstack, out."""
        return self._encoder.feature_shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self._encoder.dtype

    @torch.inference_mode()
    def begin(self, pixels: Tensor) -> Encoding:
        """As VisionEncoder.begin, padded if the image is small."""
        encoding = self._encoder.begin(pixels)
        if encoding.num_patches > self._rows[-1]:
            return encoding
        return encoding.padded(self._rows[bisect_left(self._rows, encoding.num_patches)])

    @torch.inference_mode()
    def advance(self, encoding: Encoding, stages: int) -> Tensor | None:
        """As VisionEncoder.advance; from the graph if there is one and these are all stages."""
        captured = self.captured.get(encoding.seqlens.padded)
        if captured is None or stages < self._encoder.num_stages:
            return self._encoder.advance(encoding, stages)
        static = self._static(encoding.seqlens.padded)
        static.x.copy_(encoding.x)
        static.cos_sin.copy_(encoding.cos_sin)
        static.seqlens.cu_seqlens.copy_(encoding.seqlens.cu_seqlens)
        captured.graph.replay()
        encoding.stage = stages
        tokens = encoding.num_patches // self._encoder.config.merge_size**2
        return captured.features[:tokens].clone()  # they are kept, and the next replay overwrites

    def measure(self, pool: GraphPool) -> int:
        """The bytes of all graphs, extrapolated from the largest and the smallest, which are
        captured and dropped again; 0 if none can be captured.

        Raises only out-of-memory errors.
        """
        sample = dict.fromkeys((self._rows[-1], self._rows[0]))
        free = [free_bytes(self._device)]
        try:
            for rows in sample:
                self._capture(rows, pool)
                torch.cuda.synchronize(self._device)
                free.append(free_bytes(self._device))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._give_up(error)
            return 0
        finally:
            self.captured.clear()
            pool.renew()
        return free[0] - free[1] + (free[1] - free[-1]) * (len(self._rows) - 1)

    def capture(self, pool: GraphPool) -> None:
        """Capture all graphs, the largest first; if that fails, the others are not captured, and
        no rank has to do the same: the encoder adds nothing over the ranks."""
        try:
            while self._uncaptured:
                self._capture(self._uncaptured[-1], pool)
                self._uncaptured.pop()
        except RuntimeError as error:  # out of memory, or an operation that cannot be captured
            self._give_up(error)

    @torch.inference_mode()
    def _capture(self, rows: int, pool: GraphPool) -> None:
        self._cu_seqlens[1:].fill_(rows)
        self._all_stages(rows)  # all initialization that cannot be captured
        graph, features = pool.record(lambda: self._all_stages(rows))
        graph.replay()  # the first one takes longer, and memory
        self.captured[rows] = CapturedEncoder(graph, alias(features))

    def _all_stages(self, rows: int) -> Tensor:
        features = self._encoder.advance(self._static(rows), self._encoder.num_stages)
        assert features is not None
        return features

    def _static(self, rows: int) -> Encoding:
        """The graph's input: as of an image without padding, whose length is on the device."""
        seqlens = Seqlens((rows,), self._cu_seqlens, padded=rows)
        return Encoding(self._x[:rows], self._cos_sin[:rows], seqlens)

    def _give_up(self, error: RuntimeError) -> None:
        log.warning(
            "the image encoder could not be captured, images of %d sizes are encoded without a "
            "graph: %s",
            *(len(self._uncaptured), error),
        )
        self._uncaptured.clear()
