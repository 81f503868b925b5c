"""The real launcher around stub_engine.

`python -m tests.support.server.stub_launcher PORT DRAIN_SECONDS WORKERS STORE DRAIN_DELAY`

STUB_MODEL names a model of the Hub that takes the place of the built-in one, STUB_KEYS a file of
API keys, STUB_ENGINES the number of engines.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial

from msgspec.structs import replace

from runtime.config import EngineConfig
from server.cli.api_keys import read_keys
from server.cli.model_source import built_in_directory
from server.config import ServerConfig
from server.process.launcher import launch
from server.process.listener import bind
from server.process.logs import set_up_logging


def main() -> int:
    port, drain_seconds, api_workers = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    hub_model = os.environ.get("STUB_MODEL", "")
    set_up_logging("info", "text")
    config = ServerConfig(
        port=port,
        drain_seconds=drain_seconds,
        drain_delay=float(sys.argv[5]),
        api_workers=api_workers,
        model_directory="" if hub_model else str(built_in_directory()),
        engine=EngineConfig(
            model=hub_model or "tiny-chat",
            data_parallel=int(os.environ.get("STUB_ENGINES", "1")),
        ),
        response_store=sys.argv[4],
    )
    keys = None
    if file := os.environ.get("STUB_KEYS"):
        keys = partial(read_keys, Namespace(api_key=None, api_key_file=file), {})
        config = replace(config, api_keys=keys())
    engine = "tests.support.server.stub_engine"
    return launch(config, bind(config.host, port), engine, read_keys=keys)


if __name__ == "__main__":
    sys.exit(main())
