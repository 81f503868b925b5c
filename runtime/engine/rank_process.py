"""One rank above 0: `python -m runtime.engine.rank_process`, which does what rank 0 announces.

It starts as the engine process does, and then takes steps from a ring in shared memory: it has a
part of the model and of its KV, and no scheduler.  It exits with the engine process.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
import traceback

from model_zoo.layers.error_text import first_line
from runtime.engine.followers import (
    CONFIGURATION_ERROR,
    GC_THRESHOLD,
    OUT_OF_MEMORY,
    RankArgs,
)
from runtime.ipc import parent_watch
from runtime.ipc.broadcast import BroadcastReceiver, RankLost
from runtime.logs import print_error, set_up_logging

# Rank 0 finds most of what is wrong, too: it ends, and this process with it before it has spoken.
SILENT_SECONDS = 3.0


def run(args: RankArgs) -> None:
    from runtime.ranks.group import Ranks
    from runtime.ranks.messages import decode
    from runtime.startup.loading import load

    config = args.config
    ranks = Ranks.join(
        args.rank,
        config.tensor_parallel,
        args.store,
        device=config.device,
        deterministic=config.deterministic,
    )
    executor = load(
        config, lambda phase, done, total: None, ranks=ranks, host_free=args.host_free
    ).executor
    gc.collect()
    gc.freeze()  # as in the engine process: all ranks wait for one that collects
    gc.set_threshold(GC_THRESHOLD)
    receiver = BroadcastReceiver(
        args.memory, args.pipe, reader=args.rank - 1, readers=config.tensor_parallel - 1
    )
    while True:
        executor.follow(decode(receiver.receive()))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    args = parent_watch.read_args(RankArgs)
    set_up_logging(args.logs)
    try:
        run(args)
    except RankLost as error:
        print_error(f"rank {args.rank}: {error}")
        raise SystemExit(1) from None
    except Exception as error:
        from attention.backend import UnsupportedAttention
        from model_zoo.config import ModelError
        from runtime.config import ConfigError
        from runtime.startup.device import is_out_of_memory

        time.sleep(SILENT_SECONDS)
        if isinstance(error, ConfigError | ModelError | UnsupportedAttention):
            print_error(f"rank {args.rank}: {error}")
            raise SystemExit(CONFIGURATION_ERROR) from None
        text = f"{type(error).__name__}: {first_line(error)}"
        if is_out_of_memory(error):
            text = f"{OUT_OF_MEMORY}: {first_line(error)}"
        else:
            traceback.print_exc()
        print_error(f"rank {args.rank}: {text}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
