"""Prometheus metrics of requests and of the engine.

Several API processes count into files of one folder; the one that is scraped sums them.

Native names follow Prometheus' rules (`wavefill_` prefix, base units, counters end in `_total`).
The names that vLLM's dashboards, routers and autoscalers read are aliases of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from runtime.messages import STEP_SECONDS_EDGES, STEP_TOKENS_EDGES, FinishReason, Ready, Stats
from server.generation.admission import Reason
from server.metrics.buffered_histogram import BufferedHistogram
from server.metrics.engine_counts import EngineCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
PER_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1, 2.5, 5,
)  # fmt: skip
E2E_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
    327.68, 655.36,
)  # fmt: skip
PHASE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *E2E_BUCKETS[5:])
# Label values that are exported as 0 from the start: rate() misses the first sample of a series.
INITIAL_LABELS: dict[str, tuple[str, ...]] = {
    "requests": get_args(FinishReason),
    "admission_rejections": get_args(Reason),
    "aborted": ("disconnect", "error"),
    "batch_lines": ("completed", "failed"),
}
TOKEN_COUNT_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

# alias -> native histogram
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "wavefill_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "wavefill_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "wavefill_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "wavefill_e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "wavefill_request_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "wavefill_request_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "wavefill_request_decode_time_seconds",
    "vllm:request_prompt_tokens": "wavefill_request_prompt_tokens",
    "vllm:request_generation_tokens": "wavefill_request_generation_tokens",
}


class Metrics(Collector):
    """The metrics of this process.  `name` labels every series with the served model.

    `shared` is the folder in PROMETHEUS_MULTIPROC_DIR, if there are several API processes.
    """

    def __init__(self, name: str = "model", compat: str = "vllm", shared: str = "") -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self._counted: Collector = MultiProcessCollector(None, shared) if shared else own
        self._engine_counts = EngineCounts(shared)
        self._label = {"model_name": name}
        self._compat = compat == "vllm"
        self._ready: Callable[[], Ready | None] = lambda: None
        self._stats: Callable[[], Stats] = Stats
        self._alive: Callable[[], bool] = lambda: True
        self._finished = self._counter(
            "requests", "Completions that finished, by reason.", "finished_reason"
        )
        self._rejected = self._counter(
            "admission_rejections", "Requests rejected with 429, by reason.", "reason"
        )
        self._aborted = self._counter(
            "aborted", "Completions aborted by a disconnect or an error.", "by"
        )
        self._lines = self._counter(
            "batch_lines", "Batch lines that were run, by outcome.", "outcome"
        )
        self._http = self._counter(
            "http_requests", "HTTP responses, by route and status code.", "route", "code"
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from arrival to the first token, in seconds.",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time between two deliveries of tokens, in seconds.",
            PER_TOKEN_BUCKETS,
        )
        self._buffered_inter_token = BufferedHistogram(self._inter_token, PER_TOKEN_BUCKETS)
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first of a completion, in seconds.",
            PER_TOKEN_BUCKETS,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end, in seconds.", E2E_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Time in the queue, in seconds.", PHASE_BUCKETS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "Time from scheduling to the first token, in seconds.",
            PHASE_BUCKETS,
        )
        self._decode = self._histogram(
            "request_decode_time_seconds",
            "Time from the first token to the end, in seconds.",
            PHASE_BUCKETS,
        )
        self._prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", TOKEN_COUNT_BUCKETS
        )
        self._generated = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", TOKEN_COUNT_BUCKETS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        own = self._registry
        counter = Counter(f"wavefill_{name}", text, ("model_name", *labels), registry=own)
        for value in INITIAL_LABELS.get(name, ()):
            counter.labels(*self._label.values(), value)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"wavefill_{name}", text, ("model_name",), registry=self._registry, buckets=buckets
        )
        return family.labels(**self._label)

    def watch(
        self,
        *,
        ready: Callable[[], Ready | None],
        stats: Callable[[], Stats],
        alive: Callable[[], bool],
    ) -> None:
        """Where to read the engine's numbers from, at each scrape."""
        self._ready, self._stats, self._alive = ready, stats, alive

    def request_finished(
        self,
        finish: str | None,
        prompt_tokens: int,
        generated_tokens: int,
        *,
        arrived: float,
        started: float,
        first_token: float,
        ended: float,
    ) -> None:
        """Count a completion.  Times are monotonic seconds, 0 for what did not happen."""
        self._finished.labels(**self._label, finished_reason=finish or "unknown").inc()
        self._buffered_inter_token.count()  # another process may be scraped
        self._e2e.observe(ended - arrived)
        self._prompt.observe(prompt_tokens)
        self._generated.observe(generated_tokens)
        if started:
            self._queue.observe(max(0.0, started - arrived))
        if first_token:
            self._first_token.observe(first_token - arrived)
            self._decode.observe(ended - first_token)
            if started:
                self._prefill.observe(max(0.0, first_token - started))
            if generated_tokens > 1:
                self._per_token.observe((ended - first_token) / (generated_tokens - 1))

    def inter_token(self, seconds: float) -> None:
        self._buffered_inter_token.add(seconds)

    def rejected(self, reason: str) -> None:
        """`reason` is one of server/generation/admission.py."""
        self._rejected.labels(**self._label, reason=reason).inc()

    def aborted(self, by: str) -> None:
        self._aborted.labels(**self._label, by=by).inc()

    def batch_line(self, completed: bool) -> None:
        self._lines.labels(**self._label, outcome="completed" if completed else "failed").inc()

    def http_request(self, route: str, code: int) -> None:
        """`route` is the pattern of a route, never the path of a request."""
        self._http.labels(**self._label, route=route, code=str(code)).inc()

    def render(self) -> bytes:
        """The Prometheus text format.  Takes milliseconds; any thread may call it."""
        self._buffered_inter_token.count()
        exposed = CollectorRegistry()
        exposed.register(self)
        return generate_latest(exposed)

    def collect(self) -> Iterator[Metric]:
        """All families, for prometheus_client."""
        counted = list(self._counted.collect())
        yield from counted
        yield from self._engine_families()
        if self._compat:
            yield from self._aliases(counted)

    def _engine_families(self) -> Iterator[Metric]:
        """The engine's gauges and counters, read at each scrape."""
        stats, ready, counts = self._engine_numbers()
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        waiting, running = float(stats.waiting), float(stats.running)
        gauges = {
            "wavefill_requests_running": ("Running sequences.", running),
            "wavefill_requests_waiting": ("Waiting sequences.", waiting),
            "wavefill_kv_cache_usage_ratio": ("Fraction of KV cache pages in use.", usage),
            "wavefill_engine_up": (
                "1 if the engine is ready and not stalled, else 0.",
                float(self._alive()),
            ),
        }
        counters = {
            "wavefill_prompt_tokens": ("Prompt tokens processed.", counts.prompt_tokens),
            "wavefill_prompt_tokens_cached": (
                "Prompt tokens found in the prefix cache.",
                counts.cached_tokens,
            ),
            "wavefill_prefix_cache_queries": (
                "Prefix cache queries, in tokens.",
                counts.prompt_tokens,
            ),
            "wavefill_prefix_cache_hits": ("Prefix cache hits, in tokens.", counts.cached_tokens),
            "wavefill_generation_tokens": ("Generated tokens.", counts.generated_tokens),
            "wavefill_preemptions": ("Preempted sequences.", counts.preemptions),
            "wavefill_engine_steps": ("Steps of the engine.", counts.steps),
        }
        if self._compat:
            gauges |= {
                "vllm:num_requests_running": ("Alias.", running),
                "vllm:num_requests_waiting": ("Alias.", waiting),
                "vllm:kv_cache_usage_perc": ("Alias.", usage),
            }
            counters |= {
                "vllm:prompt_tokens": ("Alias.", counts.prompt_tokens),
                "vllm:generation_tokens": ("Alias.", counts.generated_tokens),
                "vllm:prefix_cache_queries": ("Alias.", counts.prompt_tokens),
                "vllm:prefix_cache_hits": ("Alias.", counts.cached_tokens),
                "vllm:num_preemptions": ("Alias.", counts.preemptions),
            }
        if ready is not None:
            gauges |= {
                "wavefill_model_load_seconds": (
                    "Time from the start of the engine until it was ready, in seconds.",
                    ready.load_seconds,
                ),
                "wavefill_kv_capacity_tokens": (
                    "Capacity of the KV cache in tokens.",
                    float(ready.capacity_tokens),
                ),
                "wavefill_max_concurrency": (
                    "Requests of the maximum length that fit into the KV cache.",
                    ready.capacity_tokens / ready.max_model_len,
                ),
            }
            yield from self._cache_info(ready)
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=list(self._label))
            gauge.add_metric(list(self._label.values()), value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=list(self._label))
            counter.add_metric(list(self._label.values()), value)
            yield counter
        yield from self._step_families(counts)

    def _engine_numbers(self) -> tuple[Stats, Ready | None, Stats]:
        """The last statistics and Ready of the engine, and the counters of all engines so far."""
        ready, stats, ready_after = self._ready(), self._stats(), self._ready()
        # While an engine is replaced, it is unknown which one the statistics are of.
        epochs = {None if known is None else known.epoch for known in (ready, ready_after)}
        epoch = epochs.pop() if len(epochs) == 1 else None
        return stats, ready_after, self._engine_counts.take(epoch, stats)

    def _step_families(self, stats: Stats) -> Iterator[Metric]:
        """Histograms of the engine's steps: duration and number of tokens."""
        seconds = (STEP_SECONDS_EDGES, stats.step_seconds_counts, stats.step_seconds_sum)
        tokens = (STEP_TOKENS_EDGES, stats.step_tokens_counts, float(stats.step_tokens_sum))
        families = {
            "wavefill_engine_step_seconds": ("Duration of an engine step, in seconds.", seconds),
            "wavefill_iteration_tokens": ("Tokens per engine step.", tokens),
        }
        if self._compat:
            families["vllm:iteration_tokens_total"] = ("Alias.", tokens)
        for name, (text, (edges, counts, total)) in families.items():
            histogram = HistogramMetricFamily(name, text, labels=list(self._label))
            bounds = [*map(str, edges), "+Inf"]
            so_far = accumulate(counts or (0,) * len(bounds))
            buckets = list(zip(bounds, map(float, so_far), strict=True))
            histogram.add_metric(list(self._label.values()), buckets, total)
            yield histogram

    def _cache_info(self, ready: Ready) -> Iterator[Metric]:
        pages, size = str(ready.num_pages), str(ready.page_size)
        shapes = {"wavefill_cache_config_info": {"page_size": size, "num_pages": pages}}
        if self._compat:
            shapes["vllm:cache_config_info"] = {"block_size": size, "num_gpu_blocks": pages}
        for name, fields in shapes.items():
            labels = self._label | fields
            info = GaugeMetricFamily(name, "Configuration of the KV cache.", labels=list(labels))
            info.add_metric(list(labels.values()), 1.0)
            yield info

    def _aliases(self, counted: list[Metric]) -> Iterator[Metric]:
        """The native series under the names that vLLM gives them."""
        families = {family.name: family for family in counted}
        for alias, native in VLLM_HISTOGRAMS.items():
            yield _renamed(families[native], alias, self._label)
        finished = CounterMetricFamily(
            "vllm:request_success", "Alias.", labels=["model_name", "finished_reason"]
        )
        ended = families.get("wavefill_requests")
        for sample in [] if ended is None else ended.samples:
            if sample.name.endswith("_total"):
                labels = [sample.labels["model_name"], sample.labels["finished_reason"]]
                finished.add_metric(labels, sample.value)
        yield finished


def _renamed(source: Metric, name: str, label: dict[str, str]) -> Metric:
    family = HistogramMetricFamily(name, "Alias.", labels=list(label))
    buckets: list[tuple[str, float]] = []
    total = 0.0
    for sample in source.samples:
        if sample.name.endswith("_bucket"):
            buckets.append((sample.labels["le"], sample.value))
        elif sample.name.endswith("_sum"):
            total = sample.value
    family.add_metric(list(label.values()), buckets, total)
    return family
