"""The process that downloads a model for `wavefill serve`: `python -m server.cli.hub_download`.

It reads `DownloadArgs` as one line of JSON from stdin, and ends when stdin does.  It tells the API
processes how far it is, and writes the name of the model's directory into a file at the end.  Exit
code 2: the model is not available, and one line `error: ...` on stderr says what to do.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.ipc.client import ClientNotifier
from runtime.logs import print_error
from runtime.messages import DOWNLOAD, Progress
from server.cli.model_source import ModelNotFound, download
from server.process.logs import set_up_logging
from server.process.messages import DownloadArgs
from server.process.parent import read_args, watch


def main() -> None:
    args = read_args(DownloadArgs)
    watch()
    set_up_logging(args.config.log_level, args.config.log_format)
    notifier = ClientNotifier(args.client_addresses)

    def report(done: int, total: int, seconds_left: int | None) -> None:
        notifier.progress(Progress(DOWNLOAD, done, total, seconds_left))

    report(0, 0, None)
    try:
        directory = download(args.name, args.revision or None, report=report)
    except ModelNotFound as error:
        print_error(str(error))
        sys.exit(2)
    Path(args.result).write_text(str(directory), encoding="utf-8")
    notifier.close()


if __name__ == "__main__":
    main()
