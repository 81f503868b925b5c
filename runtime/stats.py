"""Stats: what an engine counts of itself, for metrics, and the counters of its executor."""

from __future__ import annotations

from msgspec import Struct

# Upper edges of the histogram buckets of steps in Stats; one more bucket takes the rest.
STEP_SECONDS_EDGES = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STEP_TOKENS_EDGES = tuple(float(2**power) for power in range(15))


class GraphCounts(Struct):
    """What an executor counts of its CUDA graphs, since it was loaded."""

    captures: int = 0
    steps_without: int = 0
    steps_in_larger: int = 0  # in one for more tokens or rows: there was none of their own size

    def reset(self) -> None:
        self.captures = self.steps_without = self.steps_in_larger = 0


class ImageCounts(Struct):
    """What an executor counts of images, since it was loaded."""

    encoded: int = 0
    seconds: float = 0.0  # of the encoder

    def reset(self) -> None:
        self.encoded = 0
        self.seconds = 0.0


class Stats(Struct, frozen=True, array_like=True):
    """Current gauges, and counters since the engine started."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0  # referenced by a running sequence
    pages_total: int = 0
    steps: int = 0
    step_tokens: int = 0  # tokens in the last step
    step_seconds: float = 0.0  # duration of the last step
    prompt_tokens: int = 0  # computed or cached, counted when scheduled first
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    step_seconds_counts: tuple[int, ...] = ()  # steps in each bucket; () before the first step
    step_seconds_sum: float = 0.0
    step_tokens_counts: tuple[int, ...] = ()
    step_tokens_sum: int = 0
    steps_without_graph: int = 0
    steps_in_larger_graph: int = 0  # there was none of their own size yet
    graphs_captured_while_decoding: int = 0  # each would delay those rows: always 0
    step_predictions: int = 0  # steps whose time was predicted, and
    step_prediction_error: float = 0.0  # the sum of |measured / predicted - 1| of those
    # Of `pages_used`, those of each group of layers; and the others that prefixes may hit.
    group_pages_used: tuple[int, ...] = ()
    group_pages_cached: tuple[int, ...] = ()
    states_used: int = 0  # recurrent states of running sequences
    snapshots_used: int = 0  # snapshots of recurrent states that prefixes may hit
    images_encoded: int = 0
    image_cache_hits: int = 0
    image_encoder_seconds: float = 0.0
