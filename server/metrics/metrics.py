"""Prometheus metrics of requests and of the engine.

Several API processes count into files of one folder; the one that is scraped sums them.

Native names follow Prometheus' rules (`wavefill_` prefix, base units, counters end in `_total`).
The names that vLLM's dashboards, routers and autoscalers read are aliases of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from runtime.messages import Ready
from runtime.stats import Stats
from server.engine import EngineState
from server.metrics.buffered_histogram import BufferedHistogram
from server.metrics.engine_families import EngineFamilies, EngineReadings
from server.metrics.families import (
    COUNTERS,
    HISTOGRAMS,
    HTTP_DURATION,
    HTTP_DURATION_BUCKETS,
    PER_TOKEN_BUCKETS,
)
from server.metrics.image_causes import ImageCause
from server.metrics.latency_window import LatencyWindow
from server.metrics.process_families import process_families
from server.metrics.vllm_names import vllm_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """The metrics of this process.  `name` labels every series with the served model.

    `shared` is the folder in PROMETHEUS_MULTIPROC_DIR, if there are several API processes.
    """

    def __init__(self, name: str = "model", compat: str = "vllm", shared: str = "") -> None:
        registry = CollectorRegistry()
        self._counted: Collector = MultiProcessCollector(None, shared) if shared else registry
        self._label = {"model_name": name}
        self._engine = EngineFamilies(self._label, shared)
        self._compat = compat == "vllm"
        self._server_pid = 0
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
        self._http_duration = Histogram(
            "wavefill_http_request_duration_seconds",
            HTTP_DURATION,
            ("model_name", "route"),
            registry=registry,
            buckets=HTTP_DURATION_BUCKETS,
        )
        # Of the last minute, for the dashboard.
        self.recent_first_token, self.recent_inter_token = LatencyWindow(), LatencyWindow()
        self._inter_token = BufferedHistogram(
            self._histograms["inter_token_latency_seconds"],
            PER_TOKEN_BUCKETS,
            self.recent_inter_token.add,
        )

    def watch(
        self,
        *,
        ready: Callable[[], Ready | None],
        stats: Callable[[], Stats],
        state: Callable[[], EngineState],
        server_pid: int = 0,
        engine: int = 0,
    ) -> None:
        """Where to read the numbers of an engine from, at each scrape.

        server_pid  of the process whose children are those of the server; 0: this one is alone
        engine      its index; called once for each
        """
        self._server_pid = server_pid
        self._engine.watch(engine, EngineReadings(ready, stats, state))

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
        """Count a completion.  Times are monotonic seconds, 0 for what did not happen.

        One that was aborted has no time to its end: it would make answers look shorter than they
        are.
        """
        histograms, complete = self._histograms, finish != "abort"
        self._count("requests", finished_reason=finish or "unknown")
        self._inter_token.count()  # another process may be scraped
        if complete:
            histograms["e2e_request_latency_seconds"].observe(ended - arrived)
        histograms["request_prompt_tokens"].observe(prompt_tokens)
        histograms["request_generation_tokens"].observe(generated_tokens)
        if started:
            histograms["request_queue_time_seconds"].observe(max(0.0, started - arrived))
            if complete:
                histograms["request_inference_time_seconds"].observe(max(0.0, ended - started))
        if first_token:
            decode = ended - first_token
            histograms["time_to_first_token_seconds"].observe(first_token - arrived)
            if complete:
                histograms["request_decode_time_seconds"].observe(decode)
            if started:
                prefill = max(0.0, first_token - started)
                histograms["request_prefill_time_seconds"].observe(prefill)
            if generated_tokens > 1:
                per_token = decode / (generated_tokens - 1)
                histograms["time_per_output_token_seconds"].observe(per_token)

    def _count(self, counter: str, count: int = 1, **labels: str) -> None:
        self._counters[counter].labels(**self._label, **labels).inc(count)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.add(seconds)

    def first_token(self, seconds: float) -> None:
        """A completion has its first token; the histogram counts it when it ends."""
        self.recent_first_token.add((seconds,))

    def keep_recent(self) -> None:
        """Keep latencies of the next seconds for the dashboard."""
        self._inter_token.count()
        self.recent_first_token.keep()
        self.recent_inter_token.keep()

    def rejected(self, reason: str) -> None:
        """`reason` is one of server/generation/admission.py."""
        self._count("admission_rejections", reason=reason)

    def image_refused(self, cause: ImageCause, count: int = 1) -> None:
        """An image of a request could not be used, or the model reads none."""
        self._count("images_refused", count, cause=cause)

    def aborted(self, by: str) -> None:
        """In addition to `request_finished`, whose reason is "abort"."""
        self._count("aborted", by=by)

    def answer_unread(self) -> None:
        """A connection was closed because its client did not read."""
        self._count("answers_unread")

    def generation_finished(self, longest: int) -> None:
        """All completions of a request have ended; longest: tokens of the longest one."""
        self._histograms["request_max_generation_tokens"].observe(longest)

    def batch_line(self, completed: bool) -> None:
        self._count("batch_lines", outcome="completed" if completed else "failed")

    def http_request(self, route: str, code: int, seconds: float) -> None:
        """`route` is the pattern of a route, never the path of a request."""
        self._count("http_requests", route=route, code=str(code))
        self._http_duration.labels(**self._label, route=route).observe(seconds)

    def render(self) -> bytes:
        """The Prometheus text format.  Takes milliseconds; any thread may call it."""
        self._inter_token.count()
        exposed = CollectorRegistry()
        exposed.register(self)
        return generate_latest(exposed)

    def collect(self) -> Iterator[Metric]:
        """All families, for prometheus_client."""
        families = {family.name: family for family in self._counted.collect()}
        families |= {family.name: family for family in self._engine.collect()}
        yield from families.values()
        yield from process_families(self._label, self._server_pid)
        if self._compat:
            yield from vllm_families(families)
