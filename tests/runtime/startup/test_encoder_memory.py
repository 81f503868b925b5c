"""What the plan counts for the image encoder is what its tensors take, counted on no device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_zoo.vision import blocks
from model_zoo.vision.encoder import VisionEncoder
from model_zoo.vision.vision_config import VisionConfig
from runtime.startup.memory_estimate import begun_bytes, encoder_bytes

# Of Qwen3-VL-8B, and as small as that of a model of 18 MB.
LARGE = VisionConfig(
    depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_size=4096, patch_size=16,
    merge_size=2, frames=2, positions=48, deepstack_layers=(8, 16, 24),
)  # fmt: skip
SMALL = VisionConfig(
    depth=6, hidden_size=96, intermediate_size=256, num_heads=3, out_size=256, patch_size=16,
    merge_size=2, frames=2, positions=8, deepstack_layers=(1, 2, 3, 4, 5),
)  # fmt: skip


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address not in self._seen:
            self._seen.add(address)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, address, num_bytes)

    def _forget(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self.now -= num_bytes


@pytest.mark.parametrize("vision", [LARGE, SMALL])
@pytest.mark.parametrize("side", [1024, 2048])
def test_the_encoder_takes_what_is_counted_and_at_most_a_fifth_less(
    vision: VisionConfig, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: attention makes its output alone, the rope is applied in place.
    monkeypatch.setattr(
        blocks,
        "encoder_attention",
        lambda qkv, seqlens: torch.empty(qkv[:, 0].shape, dtype=qkv.dtype),
    )
    monkeypatch.setattr(blocks, "rotate_queries_and_keys", lambda qkv, cos_sin: None)
    with torch.device("meta"), torch.inference_mode():
        model = VisionEncoder(vision, torch.bfloat16)
        pixels = torch.empty(side, side, 3, dtype=torch.uint8)
        with AliveBytes() as alive:
            begun = model.begin(pixels)
            features = model.advance(begun, model.num_stages)
    assert features is not None and alive.now > 0
    sizes = vision, torch.bfloat16, side * side
    counted = encoder_bytes(*sizes) + begun_bytes(*sizes)
    assert alive.peak <= counted <= 1.2 * alive.peak
