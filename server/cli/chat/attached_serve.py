"""`python -m server.cli.chat.attached_serve ARGUMENTS`: `wavefill serve` that ends with its parent.

The end of stdin means that the parent is gone, however it went; SIGTERM then drains as usual.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from server.cli.main import main


def _stop_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_parent, name="parent", daemon=True).start()
    main(["serve", *sys.argv[1:]])
