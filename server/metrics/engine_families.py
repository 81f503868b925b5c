"""The engines' gauges, counters and histograms, read at each scrape.

As vLLM's, they bear the index of their engine in the label `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client.metrics_core import HistogramMetricFamily, Metric, SummaryMetricFamily

from runtime.messages import Ready
from runtime.stats import STEP_SECONDS_EDGES, STEP_TOKENS_EDGES, Stats
from server.engine import EngineState
from server.metrics.engine_counts import GRAPH_COUNTERS, IMAGE_COUNTERS, EngineCounts


@dataclass(frozen=True)
class EngineReadings:
    """Where to read the engine's numbers from."""

    ready: Callable[[], Ready | None] = lambda: None
    stats: Callable[[], Stats] = Stats
    state: Callable[[], EngineState] = lambda: "loading"


class EngineFamilies:
    """Of all engines: each family has samples of each."""

    def __init__(self, labels: Mapping[str, str], shared: str = "") -> None:
        """labels: of every series; shared: the folder of several API processes"""
        self._labels, self._shared = labels, shared
        self._engines = {0: _Engine(labels, shared, 0)}

    def watch(self, engine: int, readings: EngineReadings) -> None:
        if engine not in self._engines:
            self._engines[engine] = _Engine(self._labels, self._shared, engine)
        self._engines[engine].readings = readings

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        families: dict[str, Metric] = {}
        for engine in self._engines.values():
            for family in engine.collect():
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples.extend(family.samples)
        yield from families.values()


class _Engine:
    """What /metrics says of an engine, and of the engines before it."""

    def __init__(self, labels: Mapping[str, str], shared: str, index: int) -> None:
        self.readings = EngineReadings()
        self._labels = {**labels, "engine": str(index)}
        self._counts = EngineCounts(shared, index)

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        stats, ready, counts = self._numbers()
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        gauge, counter = partial(self._family, "gauge"), partial(self._family, "counter")
        yield gauge("wavefill_requests_running", "Running sequences.", stats.running)
        yield gauge("wavefill_requests_waiting", "Waiting sequences.", stats.waiting)
        yield gauge("wavefill_kv_cache_usage_ratio", "Fraction of KV cache pages in use.", usage)
        if ready is not None:
            yield from self._pages_by_window(ready, stats)
            if ready.num_states:
                text = "Recurrent states of sequences in use."
                yield gauge("wavefill_states_used", text, stats.states_used)
                text = "Snapshots of recurrent states that prefixes of prompts may hit."
                yield gauge("wavefill_state_snapshots_used", text, stats.snapshots_used)
        yield from self._states()
        text = "Engines that were started after the first one."
        yield counter("wavefill_engine_restarts", text, self._counts.restarts)
        if ready is not None:
            yield from self._capacity(ready)
        prompt, cached = counts.prompt_tokens, counts.cached_tokens
        yield counter("wavefill_prompt_tokens", "Prompt tokens processed.", prompt)
        text = "Prompt tokens found in the prefix cache."
        yield counter("wavefill_prompt_tokens_cached", text, cached)
        text = "Prefix cache queries, in tokens."
        yield counter("wavefill_prefix_cache_queries", text, prompt)
        yield counter("wavefill_prefix_cache_hits", "Prefix cache hits, in tokens.", cached)
        yield counter("wavefill_generation_tokens", "Generated tokens.", counts.generated_tokens)
        yield counter("wavefill_preemptions", "Preempted sequences.", counts.preemptions)
        yield counter("wavefill_engine_steps", "Steps of the engine.", counts.steps)
        for name, text in (GRAPH_COUNTERS | IMAGE_COUNTERS).items():
            yield counter(f"wavefill_{name}", text, getattr(counts, name))
        yield self._prediction_error(counts)
        text = "Duration of an engine step, in seconds."
        seconds = (STEP_SECONDS_EDGES, counts.step_seconds_counts, counts.step_seconds_sum)
        yield self._step_histogram("wavefill_engine_step_seconds", text, *seconds)
        tokens = (STEP_TOKENS_EDGES, counts.step_tokens_counts, counts.step_tokens_sum)
        yield self._step_histogram("wavefill_iteration_tokens", "Tokens per engine step.", *tokens)

    def _pages_by_window(self, ready: Ready, stats: Stats) -> Iterator[Metric]:
        layers = "by the sliding window of the layers they belong to; 0: none."
        used, cached = stats.group_pages_used, stats.group_pages_cached
        yield self._by_window("used", f"KV pages in use, {layers}", ready, used)
        text = f"KV pages of no sequence that prefixes may hit, {layers}"
        yield self._by_window("cached", text, ready, cached)
        # A page without content belongs to no layers.
        free = stats.pages_total - stats.pages_used - sum(cached)
        yield self._family("gauge", "wavefill_kv_pages_free", "KV pages without content.", free)
        capacity = ready.kv_capacity
        held = [capacity.decode_pages(each, ready.max_model_len) for each in ready.group_windows]
        text = f"KV pages that a decoding request of the maximum length holds, {layers}"
        yield self._by_window("of_longest_request", text, ready, held)

    def _by_window(self, name: str, text: str, ready: Ready, counts: Sequence[int]) -> Metric:
        """wavefill_kv_pages_`name`; counts: of each group of layers"""
        name = f"wavefill_kv_pages_{name}"
        family, sums = Metric(name, text, "gauge"), dict.fromkeys(ready.group_windows, 0)
        for window, count in zip(ready.group_windows, counts, strict=False):
            sums[window] += count
        for window, count in sums.items():
            family.add_sample(name, self._labels | {"window": str(window)}, count)
        return family

    def _states(self) -> Iterator[Metric]:
        state = self.readings.state()
        text = "1 if the engine is ready and not stalled, else 0."
        yield self._family("gauge", "wavefill_engine_up", text, state == "ready")
        name = "wavefill_engine_state"
        family = Metric(name, "1 for the state that the engine is in, 0 for the others.", "gauge")
        for known in get_args(EngineState):
            family.add_sample(name, self._labels | {"state": known}, known == state)
        yield family

    def _capacity(self, ready: Ready) -> Iterator[Metric]:
        gauge = partial(self._family, "gauge")
        pages, size = str(ready.num_pages), str(ready.page_size)
        text = "Configuration of the KV cache."
        yield gauge("wavefill_cache_config_info", text, 1.0, page_size=size, num_pages=pages)
        text = "Time from the start of the engine until it was ready, in seconds."
        yield gauge("wavefill_model_load_seconds", text, ready.load_seconds)
        text = "Capacity of the KV cache in tokens."
        yield gauge("wavefill_kv_capacity_tokens", text, ready.capacity_tokens)
        if ready.num_states:
            text = "Recurrent states that sequences can have."
            yield gauge("wavefill_states", text, ready.num_states)
            text = "Snapshots of recurrent states that there is host memory for."
            yield gauge("wavefill_state_snapshots", text, ready.num_snapshots)
        text = "Requests of the maximum length that fit into the KV cache."
        concurrency = ready.capacity_requests(ready.max_model_len)
        yield gauge("wavefill_max_concurrency", text, concurrency)

    def _numbers(self) -> tuple[Stats, Ready | None, Stats]:
        """The last statistics and Ready of the engine, and the counters of all engines so far."""
        readings = self.readings
        ready, stats, ready_after = readings.ready(), readings.stats(), readings.ready()
        # While an engine is replaced, it is unknown which one the statistics are of.
        epochs = {None if known is None else known.epoch for known in (ready, ready_after)}
        epoch = epochs.pop() if len(epochs) == 1 else None
        return stats, ready_after, self._counts.take(epoch, stats)

    def _prediction_error(self, counts: Stats) -> Metric:
        family = SummaryMetricFamily(
            "wavefill_step_prediction_error_ratio",
            "|measured / predicted - 1| of the time of a step, which sizes the chunks of prefill.",
            labels=list(self._labels),
        )
        values = counts.step_predictions, counts.step_prediction_error
        family.add_metric(list(self._labels.values()), *values)
        return family

    def _step_histogram(
        self, name: str, text: str, edges: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        """`counts` are those of each bucket, () before the first step."""
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        bounds = [*map(str, edges), "+Inf"]
        buckets = zip(bounds, accumulate(counts or (0,) * len(bounds)), strict=True)
        family.add_metric(list(self._labels.values()), list(buckets), total)
        return family

    def _family(
        self, kind: Literal["gauge", "counter"], name: str, text: str, value: float, **labels: str
    ) -> Metric:
        """A family of one sample."""
        family = Metric(name, text, kind)
        sample = f"{name}_total" if kind == "counter" else name
        family.add_sample(sample, self._labels | labels, value)
        return family
