"""The dashboard `engine`: what the engines' steps do."""

from __future__ import annotations

from expressions import CACHED, GENERATED, PROMPT, STATE, STEP, TOKENS
from panels import (
    GOOD_LOW,
    SELECT,
    Panel,
    gauge,
    graph,
    heatmap,
    quantile,
    quantiles,
    rate,
    row,
    table,
    tile,
)

DESCRIPTION = "What the steps of the engines do."


def engine() -> list[Panel]:
    return [
        tile(
            "Steps",
            "Steps of the engines in a second.",
            "ops",
            rate("wavefill_engine_steps_total"),
        ),
        tile(
            "Step, p99",
            "99 of 100 steps were shorter. With many prompts it is --itl-target-ms that bounds it.",
            "s",
            quantile(0.99, STEP),
            GOOD_LOW["itl"],
        ),
        tile(
            "Tokens a step",
            "Mean of the tokens that a step computes, those of prompts included.",
            "short",
            f"{rate(f'{TOKENS}_sum')} / {rate(f'{TOKENS}_count')}",
        ),
        tile(
            "Busy",
            "Share of the time in which the engines compute a step; 1 is all of it.",
            "percentunit",
            f"{rate(f'{STEP}_sum')} / {gauge('wavefill_engine_up', how='count')}",
        ),
        tile(
            "Restarts",
            "Engines that died in the chosen range and were started again.",
            "short",
            f"sum (increase(wavefill_engine_restarts_total{{{SELECT}}}[$__range]))",
            GOOD_LOW["some"],
        ),
        tile(
            "Load time",
            "From the start of an engine until it was ready, of the slowest.",
            "s",
            gauge("wavefill_model_load_seconds", how="max"),
        ),
        row("Steps"),
        graph("Duration of steps", "Its part on the host included.", "s", quantiles(STEP)),
        heatmap(
            "Steps by duration",
            "The lower band is steps that decode only, what is above has prompts in it.",
            "s",
            STEP,
        ),
        graph(
            "Tokens of a step", "Of prompts and of answers together.", "short", quantiles(TOKENS)
        ),
        heatmap("Steps by tokens", "How many tokens steps have.", "short", TOKENS),
        row("Tokens"),
        graph(
            "Prompt tokens",
            "Prompt tokens in a second: all, and those that were found in the prefix cache.",
            "short",
            [("all", rate(PROMPT)), ("found", rate(CACHED))],
        ),
        graph(
            "Generated tokens",
            "Tokens of answers in a second, by server.",
            "short",
            [("{{instance}}", rate(GENERATED, "instance"))],
            stacked=True,
        ),
        row("Images"),
        graph(
            "Images",
            "Images in a second that the encoder ran for, and images of prompts whose "
            "features were cached. 0 for models of text.",
            "ops",
            [
                ("encoded", rate("wavefill_images_encoded_total")),
                ("found", rate("wavefill_image_cache_hits_total")),
            ],
        ),
        graph(
            "Time in the encoder of images",
            "Share of each engine's time: what steps take longer where prompts have images.",
            "percentunit",
            [
                (
                    "{{instance}} {{engine}}",
                    rate("wavefill_image_encoder_seconds_total", "instance, engine"),
                )
            ],
        ),
        graph(
            "Images refused",
            "In a second, by cause; docs/operate.md says what each is.",
            "ops",
            [("{{cause}}", rate("wavefill_images_refused_total", "cause"))],
        ),
        row("State"),
        STATE,
        graph(
            "Restarts",
            "Engines that were started after the first one of their server.",
            "short",
            [("{{instance}}", gauge("wavefill_engine_restarts_total", "instance"))],
            GOOD_LOW["some"],
        ),
        table(
            "What runs",
            "Versions of each server.",
            gauge(
                "wavefill_build_info",
                "instance, model_name, version, python_version, torch_version",
            ),
        ),
        table(
            "KV caches",
            "Pages of each engine, and tokens in a page.",
            gauge("wavefill_cache_config_info", "instance, engine, num_pages, page_size"),
        ),
    ]
