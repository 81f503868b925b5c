"""The output on the terminal: loading progress, the start report, then a line while busy."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from importlib.metadata import version
from typing import get_args

from runtime.messages import Ready
from runtime.stats import Stats
from server.config import LogLevel, ServerConfig
from server.engine import Engine
from server.process.report.loading_report import LoadingReport
from server.process.report.unused_options import (
    unused_file_options,
    unused_image_options,
    unused_rank_options,
    unused_state_options,
)

log = logging.getLogger("wavefill.report")

POLL_SECONDS = 0.1
BUSY_SECONDS = 10.0
USUAL_TOKENS = 2048  # of a request, for how many of them fit
GIB = 2**30
LEVELS = get_args(LogLevel)


class Reporter:
    """Reports changes of the engine, on stdout or in the JSON log."""

    def __init__(
        self, config: ServerConfig, client: Engine, *, chats: bool = True, processes: bool = True
    ) -> None:
        """chats: whether the model has a chat template, for the example request.

        processes: whether its files say how images are to be resized for it
        """
        self._config = config
        self._chats, self._processes = chats, processes
        self._client = client
        self._loading = LoadingReport(json=config.log_format == "json")

    async def run(self) -> None:
        try:
            await self._report()
        finally:  # a bar does not stay on the terminal
            self._loading.end()

    async def _report(self) -> None:
        """In full when the first engine is ready, in a line of each that is ready after it."""
        reported: dict[int, Ready] = {}
        before, last = Stats(), time.monotonic()
        while True:
            await asyncio.sleep(POLL_SECONDS if self._client.ready is None else 1.0)
            engines = self._client.engines
            ready = {each.index: each.ready for each in engines if each.ready is not None}
            if not ready:
                reported.clear()  # the engine died and is started again
                if self._reports():
                    self._loading.show(self._client.progress)
                continue
            for index, started in ready.items():
                if reported.get(index) is started:
                    continue
                if not reported:
                    self._loading.end()
                    self._warn_of_unused_options(started)
                    before, last = Stats(), time.monotonic()
                    self._say(self._full(started))
                if len(engines) > 1:
                    self._say(engine_line(index, len(engines), started))
                reported[index] = started
            if reported.keys() != ready.keys():  # one died: the sums are smaller
                reported = {index: reported[index] for index in ready}
                before, last = self._client.stats, time.monotonic()
            elapsed = time.monotonic() - last
            if elapsed >= BUSY_SECONDS:
                stats = self._client.stats
                if stats.steps != before.steps:
                    self._say(busy_line(stats, before, elapsed))
                before, last = stats, time.monotonic()

    def _warn_of_unused_options(self, ready: Ready) -> None:
        name = self._config.served_names[0]
        if unused := unused_file_options(self._config):
            _warn(unused, "files and batches are off without --data-dir")
        states = unused_state_options(self._config.engine)
        if states and not ready.num_states:
            _warn(states, f"{name} has no recurrent states")
        ranks = unused_rank_options(self._config.engine)
        if ranks and ready.ranks == 1:
            _warn(ranks, f"one device has all of {name}")
        images = unused_image_options(self._config)
        if images and not (ready.reads_images and self._processes):
            _warn(images, _why_text(ready, name))

    def _full(self, ready: Ready) -> str:
        return start_report(self._config, ready, chats=self._chats, processes=self._processes)

    def _reports(self) -> bool:
        return LEVELS.index(self._config.log_level) <= LEVELS.index("info")

    def _say(self, text: str) -> None:
        """Print the text, or log it as one event with --log-format json."""
        if not self._reports():
            return
        if self._config.log_format == "json":
            log.info("%s", text.strip())
        else:
            print(text, file=sys.stdout, flush=True)


def start_report(
    config: ServerConfig, ready: Ready, *, chats: bool = True, processes: bool = True
) -> str:
    """The configuration, the limits, and an example request; the rest as Reporter has it."""
    name = config.served_names[0]
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::", "") else config.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{config.port}"
    sizes = ready.memory or [("weights", ready.weight_bytes), ("KV", ready.kv_bytes)]
    memory = " | ".join(f"{name} {_size(count)}" for name, count in sizes)
    # The KV cache, and not --max-model-len, limits the length of requests.
    longer = ready.kv_capacity.needed(ready.max_model_len + ready.page_size)
    short = not config.engine.max_model_len and longer > ready.num_pages
    limited = " (limited by KV)" if short else ""
    key = " -H 'authorization: Bearer KEY'" if config.api_keys else ""
    path, prompt = "completions", '"prompt": "Hello"'
    if chats:
        path, prompt = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    phases = " | ".join(f"{name} {seconds:.1f}" for name, seconds in ready.phases)
    start = f"  start   {phases} s\n" if phases else ""
    ranks = _ranks(config, ready)
    layers = _text_part(ready, processes) + "".join(f"  layers  {line}\n" for line in ready.layers)
    return f"""
wavefill {version("wavefill")}  {name} ({ready.model_type}, {ready.dtype}) on {ready.device}, \
attention {ready.attention}
  memory  {memory}
  KV      {ready.capacity_tokens:,} tokens ({ready.page_size} a page) = {_requests(ready)}
  limits  {ready.max_model_len:,} tokens a request{limited} | \
{ready.max_num_seqs:,} running, {config.max_queue:,} with the queue | \
{ready.max_batched_tokens:,} tokens a step
{ranks}{_states(ready)}{layers}{start}  ready   {ready.load_seconds:.1f} s    {url}/v1   \
playground /   dashboard /dashboard   docs /docs   metrics /metrics   health /health

  curl {url}/v1/{path} -H 'content-type: application/json'{key} \\
    -d '{{"model": "{name}", {prompt}}}'
"""


def engine_line(index: int, count: int, ready: Ready) -> str:
    """Of one engine of several, once it is ready."""
    return (
        f"engine {index} of {count} ready in {ready.load_seconds:.1f} s: {ready.device}, "
        f"KV {ready.capacity_tokens:,} tokens, {ready.max_num_seqs:,} running"
    )


def _ranks(config: ServerConfig, ready: Ready) -> str:
    """Why --tensor-parallel auto has taken as many devices as it has, --expert-parallel, and how
    the devices add what each has computed."""
    parts = [f"--tensor-parallel auto: {ready.why_ranks}"] if ready.why_ranks else []
    if config.engine.expert_parallel and ready.ranks > 1:
        parts.append("whole experts on each")
    if ready.all_reduce:
        parts.append(f"sums {ready.all_reduce}")
    return f"  ranks   {' | '.join(parts)}\n" if parts else ""


def _states(ready: Ready) -> str:
    """Of a model with recurrent states: how many sequences can have one, how many snapshots of them
    the prefix cache has, and which kernels compute them."""
    if not ready.num_states:
        return ""
    cache = "no prefix cache"
    if ready.num_snapshots:
        cache = f"{ready.num_snapshots:,} snapshots in host memory for the prefix cache"
    kernels = f" | {ready.delta_nets}" if ready.delta_nets else ""
    return (
        f"  states  {ready.num_states:,}: one a sequence, two with a grammar | {cache}{kernels}\n"
    )


def _warn(options: list[str], why: str) -> None:
    log.warning("%s: without effect, since %s", " and ".join(options), why)


def _why_text(ready: Ready, name: str) -> str:
    """Why a model reads text alone."""
    if ready.text_part:
        return f"images are switched off (--max-image-pixels 0), so that {name} reads text alone"
    if ready.reads_images:
        return (
            f"the files of {name} do not say how images are resized: add preprocessor_config.json"
        )
    return f"{name} is no model that reads images"


def _text_part(ready: Ready, processes: bool) -> str:
    if ready.reads_images and not processes:
        return (
            "  reads   text: preprocessor_config.json, which says how images are resized, is "
            "missing or of an unknown type: add it, or --max-image-pixels 0 frees the memory of "
            "images\n"
        )
    if not ready.text_part:
        return ""
    return "  reads   text: the part of this model that sees images is not loaded\n"


def _requests(ready: Ready) -> str:
    """How many requests the KV cache holds, of the maximum length and of a usual one."""
    lengths = [ready.max_model_len, *(USUAL_TOKENS,) * (ready.max_model_len > USUAL_TOKENS)]
    return ", ".join(
        f"{ready.capacity_requests(length):,.1f} requests of {length:,}" for length in lengths
    )


def busy_line(stats: Stats, before: Stats, seconds: float) -> str:
    """The activity of the engine since `before`."""
    prompt = stats.prompt_tokens - before.prompt_tokens
    cached = stats.cached_tokens - before.cached_tokens
    generated = stats.generated_tokens - before.generated_tokens
    return (
        f"running {stats.running} | waiting {stats.waiting} | "
        f"KV {100 * stats.pages_used / max(1, stats.pages_total):.0f} % | "
        f"prompt {prompt / seconds:.0f} tok/s ({100 * cached / max(1, prompt):.0f} % cached) | "
        f"generated {generated / seconds:.0f} tok/s"
    )


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
