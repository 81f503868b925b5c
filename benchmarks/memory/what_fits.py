"""Which models fit which GPU: the table of docs/models.md, by the code of `wavefill plan`.

    python -m benchmarks.memory.what_fits [NAME...]

It needs neither a GPU nor weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes.published import FAMILIES
from benchmarks.shapes.quantization import FP8, INT4, MXFP4
from model_zoo.config import ModelConfig, read_config
from runtime.config import ConfigError, EngineConfig
from runtime.startup.fit.target import FitQuery, resolve_config, target_device
from runtime.startup.memory_estimate import parameter_counts, weight_bytes

GIB = 2**30
CARDS = (24, 48, 80, 140)  # GiB
HEAD = "| model | parameters | active | weights | a token | " + " | ".join(
    f"{card} GiB" for card in CARDS
)


def formats_of(name: str) -> tuple[dict[str, Any] | None, ...]:
    """The `quantization_config` of each form in which the model is compared; None: bfloat16."""
    return (None, MXFP4) if name.startswith("gpt-oss") else (None, FP8, INT4)


def row(name: str) -> str:
    """A line of the table."""
    weights: list[float] = []
    tokens: dict[int, list[int]] = {card: [] for card in CARDS}
    config: ModelConfig | None = None
    for quantization in formats_of(name):
        with tempfile.TemporaryDirectory() as folder:
            fields = FAMILIES[name] | {"quantization_config": quantization}
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            config = read_config(folder)
            queries = {
                card: FitQuery(config=EngineConfig(model=folder), card=card * GIB) for card in CARDS
            }
            for card, query in queries.items():
                tokens[card].append(_kv_tokens(query, config))
            scheme_of = target_device(queries[CARDS[0]], config).scheme_of
            weights.append(weight_bytes(config, torch.bfloat16, scheme_of) / GIB)
    assert config is not None
    total, active = (f"{count / 1e9:.1f}" for count in parameter_counts(config))
    cells = [name, total, active if config.moe else "", " / ".join(f"{w:.1f}" for w in weights)]
    cells.append(_kv_of_a_token(config))
    cells += [" / ".join(map(_shown, tokens[card])) for card in CARDS]
    return f"| {' | '.join(cells)} |"


def _kv_tokens(query: FitQuery, config: ModelConfig) -> int:
    """Tokens of KV beside the weights; 0: it does not fit."""
    try:
        resolved = resolve_config(query.config, config, target_device(query, config))
    except ConfigError:
        return 0
    return resolved.kv_capacity.tokens(resolved.num_pages, resolved.max_model_len)


def _kv_of_a_token(config: ModelConfig) -> str:
    """KiB in bfloat16, and behind a plus what only the last positions have."""
    each, specs = config.kv_bytes_per_token(2) // 1024, config.attention_specs
    within = sum(1 for spec in specs if spec.window) * each // len(specs)
    return f"{each - within} + {within}" if within else str(each)


def _shown(tokens: int) -> str:
    if tokens == 0:
        return "-"
    return f"{tokens // 1000}k" if tokens < 999_500 else f"{tokens / 1e6:.1f}M"


def table(names: list[str]) -> Iterator[str]:
    yield f"{HEAD} |"
    yield "|---" * HEAD.count("|") + "|"
    yield from map(row, names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAMILIES)}")
    names = parser.parse_args().names or list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        parser.error(f"{unknown[0]}: known are {', '.join(FAMILIES)}")
    for line in table(names):
        print(line, flush=True)


if __name__ == "__main__":
    main()
