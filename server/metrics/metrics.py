"""Prometheus metrics of requests and of the engine.

Several API processes count into files of one folder; the one that is scraped sums them.

Native names follow Prometheus' rules (`wavefill_` prefix, base units, counters end in `_total`).
The names that vLLM's dashboards, routers and autoscalers read are aliases of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from runtime.messages import STEP_SECONDS_EDGES, STEP_TOKENS_EDGES, FinishReason, Ready, Stats
from server.generation.admission import Reason
from server.metrics.buffered_histogram import BufferedHistogram
from server.metrics.engine_counts import GRAPH_COUNTERS, EngineCounts

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
TOKEN_COUNT_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

# Name -> help, and labels with the values that are exported as 0 from the start: rate() misses the
# first sample of a series.
COUNTERS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "requests": (
        "Completions that finished, by reason.",
        {"finished_reason": get_args(FinishReason)},
    ),
    "admission_rejections": (
        "Requests rejected with 429, by reason.",
        {"reason": get_args(Reason)},
    ),
    "aborted": (
        "Completions aborted by a disconnect or an error.",
        {"by": ("disconnect", "error")},
    ),
    "batch_lines": (
        "Batch lines that were run, by outcome.",
        {"outcome": ("completed", "failed")},
    ),
    "http_requests": ("HTTP responses, by route and status code.", {"route": (), "code": ()}),
}
# Name -> help and buckets.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": (
        "Time from arrival to the first token, in seconds.",
        FIRST_TOKEN_BUCKETS,
    ),
    "inter_token_latency_seconds": (
        "Time between two deliveries of tokens, in seconds.",
        PER_TOKEN_BUCKETS,
    ),
    "time_per_output_token_seconds": (
        "Mean time per token after the first of a completion, in seconds.",
        PER_TOKEN_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("Time from arrival to the end, in seconds.", E2E_BUCKETS),
    "request_queue_time_seconds": ("Time in the queue, in seconds.", PHASE_BUCKETS),
    "request_prefill_time_seconds": (
        "Time from scheduling to the first token, in seconds.",
        PHASE_BUCKETS,
    ),
    "request_decode_time_seconds": (
        "Time from the first token to the end, in seconds.",
        PHASE_BUCKETS,
    ),
    "request_prompt_tokens": ("Prompt tokens per request.", TOKEN_COUNT_BUCKETS),
    "request_generation_tokens": ("Generated tokens per request.", TOKEN_COUNT_BUCKETS),
}
VLLM_ALIASES = {
    "vllm:num_requests_running": "wavefill_requests_running",
    "vllm:num_requests_waiting": "wavefill_requests_waiting",
    "vllm:kv_cache_usage_perc": "wavefill_kv_cache_usage_ratio",
    "vllm:prompt_tokens": "wavefill_prompt_tokens",
    "vllm:generation_tokens": "wavefill_generation_tokens",
    "vllm:prefix_cache_queries": "wavefill_prefix_cache_queries",
    "vllm:prefix_cache_hits": "wavefill_prefix_cache_hits",
    "vllm:num_preemptions": "wavefill_preemptions",
    "vllm:iteration_tokens_total": "wavefill_iteration_tokens",
    "vllm:time_to_first_token_seconds": "wavefill_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "wavefill_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "wavefill_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "wavefill_e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "wavefill_request_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "wavefill_request_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "wavefill_request_decode_time_seconds",
    "vllm:request_prompt_tokens": "wavefill_request_prompt_tokens",
    "vllm:request_generation_tokens": "wavefill_request_generation_tokens",
    "vllm:request_success": "wavefill_requests",
}


class Metrics(Collector):
    """The metrics of this process.  `name` labels every series with the served model.

    `shared` is the folder in PROMETHEUS_MULTIPROC_DIR, if there are several API processes.
    """

    def __init__(self, name: str = "model", compat: str = "vllm", shared: str = "") -> None:
        registry = CollectorRegistry()
        self._counted: Collector = MultiProcessCollector(None, shared) if shared else registry
        self._engine_counts = EngineCounts(shared)
        self._label = {"model_name": name}
        self._compat = compat == "vllm"
        self._ready: Callable[[], Ready | None] = lambda: None
        self._stats: Callable[[], Stats] = Stats
        self._alive: Callable[[], bool] = lambda: True
        self._counters: dict[str, Counter] = {}
        for counter, (text, labels) in COUNTERS.items():
            made = Counter(f"wavefill_{counter}", text, ("model_name", *labels), registry=registry)
            for values in product(*labels.values()):
                made.labels(name, *values)
            self._counters[counter] = made
        self._histograms = {
            histogram: Histogram(
                f"wavefill_{histogram}", text, ("model_name",), registry=registry, buckets=buckets
            ).labels(name)
            for histogram, (text, buckets) in HISTOGRAMS.items()
        }
        self._inter_token = BufferedHistogram(
            self._histograms["inter_token_latency_seconds"], PER_TOKEN_BUCKETS
        )

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
        histograms = self._histograms
        self._count("requests", finished_reason=finish or "unknown")
        self._inter_token.count()  # another process may be scraped
        histograms["e2e_request_latency_seconds"].observe(ended - arrived)
        histograms["request_prompt_tokens"].observe(prompt_tokens)
        histograms["request_generation_tokens"].observe(generated_tokens)
        if started:
            histograms["request_queue_time_seconds"].observe(max(0.0, started - arrived))
        if first_token:
            decode = ended - first_token
            histograms["time_to_first_token_seconds"].observe(first_token - arrived)
            histograms["request_decode_time_seconds"].observe(decode)
            if started:
                prefill = max(0.0, first_token - started)
                histograms["request_prefill_time_seconds"].observe(prefill)
            if generated_tokens > 1:
                per_token = decode / (generated_tokens - 1)
                histograms["time_per_output_token_seconds"].observe(per_token)

    def _count(self, counter: str, **labels: str) -> None:
        self._counters[counter].labels(**self._label, **labels).inc()

    def inter_token(self, seconds: float) -> None:
        self._inter_token.add(seconds)

    def rejected(self, reason: str) -> None:
        """`reason` is one of server/generation/admission.py."""
        self._count("admission_rejections", reason=reason)

    def aborted(self, by: str) -> None:
        self._count("aborted", by=by)

    def batch_line(self, completed: bool) -> None:
        self._count("batch_lines", outcome="completed" if completed else "failed")

    def http_request(self, route: str, code: int) -> None:
        """`route` is the pattern of a route, never the path of a request."""
        self._count("http_requests", route=route, code=str(code))

    def render(self) -> bytes:
        """The Prometheus text format.  Takes milliseconds; any thread may call it."""
        self._inter_token.count()
        exposed = CollectorRegistry()
        exposed.register(self)
        return generate_latest(exposed)

    def collect(self) -> Iterator[Metric]:
        """All families, for prometheus_client."""
        families = {family.name: family for family in self._counted.collect()}
        families |= {family.name: family for family in self._engine_families()}
        yield from families.values()
        if self._compat:
            for alias, native in VLLM_ALIASES.items():
                yield _renamed(families[native], alias)

    def _engine_families(self) -> Iterator[Metric]:
        """The engine's gauges, counters and histograms, read at each scrape."""
        stats, ready, counts = self._engine_numbers()
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        gauge, counter = partial(self._family, "gauge"), partial(self._family, "counter")
        yield gauge("wavefill_requests_running", "Running sequences.", stats.running)
        yield gauge("wavefill_requests_waiting", "Waiting sequences.", stats.waiting)
        yield gauge("wavefill_kv_cache_usage_ratio", "Fraction of KV cache pages in use.", usage)
        text = "1 if the engine is ready and not stalled, else 0."
        yield gauge("wavefill_engine_up", text, self._alive())
        if ready is not None:
            pages, size = str(ready.num_pages), str(ready.page_size)
            text = "Configuration of the KV cache."
            yield gauge("wavefill_cache_config_info", text, 1.0, page_size=size, num_pages=pages)
            if self._compat:
                name = "vllm:cache_config_info"
                yield gauge(name, text, 1.0, block_size=size, num_gpu_blocks=pages)
            text = "Time from the start of the engine until it was ready, in seconds."
            yield gauge("wavefill_model_load_seconds", text, ready.load_seconds)
            text = "Capacity of the KV cache in tokens."
            yield gauge("wavefill_kv_capacity_tokens", text, ready.capacity_tokens)
            text = "Requests of the maximum length that fit into the KV cache."
            concurrency = ready.capacity_tokens / ready.max_model_len
            yield gauge("wavefill_max_concurrency", text, concurrency)
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
        for name, text in GRAPH_COUNTERS.items():
            yield counter(f"wavefill_{name}", text, getattr(counts, name))
        text = "Duration of an engine step, in seconds."
        seconds = (STEP_SECONDS_EDGES, counts.step_seconds_counts, counts.step_seconds_sum)
        yield self._step_histogram("wavefill_engine_step_seconds", text, *seconds)
        tokens = (STEP_TOKENS_EDGES, counts.step_tokens_counts, counts.step_tokens_sum)
        yield self._step_histogram("wavefill_iteration_tokens", "Tokens per engine step.", *tokens)

    def _engine_numbers(self) -> tuple[Stats, Ready | None, Stats]:
        """The last statistics and Ready of the engine, and the counters of all engines so far."""
        ready, stats, ready_after = self._ready(), self._stats(), self._ready()
        # While an engine is replaced, it is unknown which one the statistics are of.
        epochs = {None if known is None else known.epoch for known in (ready, ready_after)}
        epoch = epochs.pop() if len(epochs) == 1 else None
        return stats, ready_after, self._engine_counts.take(epoch, stats)

    def _step_histogram(
        self, name: str, text: str, edges: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        """`counts` are those of each bucket, () before the first step."""
        family = HistogramMetricFamily(name, text, labels=list(self._label))
        bounds = [*map(str, edges), "+Inf"]
        buckets = zip(bounds, accumulate(counts or (0,) * len(bounds)), strict=True)
        family.add_metric(list(self._label.values()), list(buckets), total)
        return family

    def _family(
        self, kind: Literal["gauge", "counter"], name: str, text: str, value: float, **labels: str
    ) -> Metric:
        """A family of one sample."""
        family = Metric(name, text, kind)
        sample = f"{name}_total" if kind == "counter" else name
        family.add_sample(sample, self._label | labels, value)
        return family


def _renamed(source: Metric, name: str) -> Metric:
    family = Metric(name, "Alias.", source.type)
    family.samples = [
        sample._replace(name=name + sample.name.removeprefix(source.name))
        for sample in source.samples
        if not sample.name.endswith("_created")
    ]
    return family
