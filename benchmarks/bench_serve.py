"""`python -m benchmarks.bench_serve [options]` is `wavefill bench serve [options]`."""

from __future__ import annotations

import sys

from server.cli import main

if __name__ == "__main__":
    main(["bench", "serve", *sys.argv[1:]])
