"""The dashboard `capacity`: how full the servers are, and of what."""

from __future__ import annotations

from panels import GOOD_LOW, Panel, gauge, graph, heatmap, rate, ratio, row, tile

DESCRIPTION = "How full the servers are, and of what."


def capacity() -> list[Panel]:
    hits = ratio(
        rate("wavefill_prefix_cache_hits_total"), rate("wavefill_prefix_cache_queries_total")
    )
    kv = gauge("wavefill_kv_cache_usage_ratio", how="max")
    fds = gauge("process_open_fds", "instance, process")
    return [
        tile(
            "KV in use",
            "Share of the KV cache's pages that running sequences hold, of the fullest server. "
            "Pages that are kept for their prefix alone count as free.",
            "percentunit",
            kv,
            GOOD_LOW["share"],
        ),
        tile(
            "KV capacity",
            "Tokens that fit into the KV caches of the chosen servers.",
            "short",
            gauge("wavefill_kv_capacity_tokens"),
        ),
        tile(
            "Longest requests that fit",
            "Requests of the maximum length that fit into the KV caches at a time.",
            "short",
            gauge("wavefill_max_concurrency"),
        ),
        tile(
            "Found in the prefix cache",
            "Share of prompt tokens that did not have to be computed.",
            "percentunit",
            hits,
        ),
        tile(
            "Rejected",
            "Requests that got 429 in a second, for any reason.",
            "reqps",
            rate("wavefill_admission_rejections_total"),
            GOOD_LOW["some"],
        ),
        tile(
            "Preempted",
            "Sequences in a second that lost their pages to others and computed again.",
            "ops",
            rate("wavefill_preemptions_total"),
            GOOD_LOW["some"],
        ),
        row("Queue and KV cache"),
        graph(
            "KV in use by server",
            "A full cache is no trouble as long as no request is preempted.",
            "percentunit",
            [
                (
                    "{{instance}} {{engine}}",
                    gauge("wavefill_kv_cache_usage_ratio", "instance, engine"),
                )
            ],
            GOOD_LOW["share"],
        ),
        graph(
            "KV pages by layers",
            "Pages in use, and cached ones, which are free to take, by the sliding window of the "
            "layers that they belong to; 0: layers without one.",
            "short",
            [
                ("window {{window}}, in use", gauge("wavefill_kv_pages_used", "window")),
                ("window {{window}}, cached", gauge("wavefill_kv_pages_cached", "window")),
            ],
            stacked=True,
        ),
        graph(
            "Recurrent states",
            "Of hybrid models: states that sequences have, of those there are. Without a free "
            "state requests wait. Other models have none.",
            "short",
            [
                ("in use", f"{gauge('wavefill_states_used')} or vector(0)"),
                ("there are", f"{gauge('wavefill_states')} or vector(0)"),
            ],
        ),
        graph(
            "Waiting by server",
            "Sequences in the queue: what to scale on.",
            "short",
            [("{{instance}}", gauge("wavefill_requests_waiting", "instance"))],
            GOOD_LOW["waiting"],
        ),
        graph(
            "Running by server",
            "Sequences in the batch; --max-num-seqs is their limit.",
            "short",
            [("{{instance}}", gauge("wavefill_requests_running", "instance"))],
        ),
        graph(
            "Rejected by reason",
            "Requests that got 429. queue_full: --max-queue; the others are in the documentation.",
            "reqps",
            [("{{reason}}", rate("wavefill_admission_rejections_total", "reason"))],
            stacked=True,
        ),
        graph(
            "Preempted by server",
            "Too many sequences for the KV cache: lower --max-num-seqs or raise --gpu-memory.",
            "ops",
            [("{{instance}}", rate("wavefill_preemptions_total", "instance"))],
            GOOD_LOW["some"],
        ),
        graph(
            "Found in the prefix cache",
            "Share of prompt tokens that did not have to be computed.",
            "percentunit",
            [("found", hits)],
        ),
        row("What is asked for"),
        heatmap(
            "Prompts by tokens",
            "How long prompts are: what fills the KV cache.",
            "short",
            "wavefill_request_prompt_tokens",
        ),
        heatmap(
            "Answers by tokens",
            "How long answers are: what keeps the batch full.",
            "short",
            "wavefill_request_generation_tokens",
        ),
        row("Processes"),
        graph(
            "Memory of the host",
            "Resident memory of the launcher, the engine and the API processes.",
            "bytes",
            [("{{process}}", gauge("process_resident_memory_bytes", "process"))],
            stacked=True,
        ),
        graph(
            "CPU",
            "Cores in use. API processes that need a whole core each: raise --api-workers.",
            "short",
            [("{{process}}", rate("process_cpu_seconds_total", "process"))],
            stacked=True,
        ),
        graph(
            "Open files",
            "Share of the limit (ulimit -n), of the fullest process of a kind. Most of them are "
            "connections.",
            "percentunit",
            [
                (
                    "{{instance}} {{process}}",
                    f"{fds} / {gauge('process_max_fds', 'instance, process')}",
                )
            ],
            GOOD_LOW["share"],
        ),
    ]
