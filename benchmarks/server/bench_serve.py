"""`python -m benchmarks.server.bench_serve [options]` is `wavefill bench serve [options]`."""

from __future__ import annotations

import sys

from server.cli.main import main

if __name__ == "__main__":
    main(["bench", "serve", *sys.argv[1:]])
