"""`wavefill ls`: the models that were downloaded."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from server.cli.model_cache import ago, scan, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the models in the local cache of the Hub, the last used first: their size, when they "
        "were used, and when they were downloaded.  `wavefill rm` removes them."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print them as JSON, sizes in bytes")
    form.add_argument("--names", action="store_true", help="print their names only, one a line")


def run(args: argparse.Namespace) -> int:
    from huggingface_hub import constants

    models = scan()
    if args.json:
        entries = [asdict(model) for model in models]
        print(json.dumps({"cache": constants.HF_HUB_CACHE, "models": entries}, indent=2))
        return 0
    if args.names:
        print("".join(f"{model.name}\n" for model in models), end="")
        return 0
    if not models:
        print(f"no models in {constants.HF_HUB_CACHE}: `wavefill pull HUB_ID` downloads one")
        return 0
    now = time.time()
    width = max(len("model"), *(len(model.name) for model in models))
    print(f"{'model':<{width}}  {'size':>10}  {'used':<14}  downloaded")
    for model in models:
        note = "" if model.servable else "  (no safetensors)"
        print(
            f"{model.name:<{width}}  {size(model.bytes):>10}  {ago(now - model.used):<14}  "
            f"{ago(now - model.downloaded)}{note}"
        )
    total = size(sum(model.bytes for model in models))
    count = "1 model" if len(models) == 1 else f"{len(models)} models"
    print(f"{count}, {total} in {constants.HF_HUB_CACHE}")
    return 0
