"""Memory, open files, the port, the folders of caches and the clock."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

from server.cli.doctor.check import Result

GIB = 2**30
MIN_FREE_MEMORY = 2 * GIB  # an engine's process with PyTorch and CUDA takes that
MIN_FREE_DISK = 10 * GIB  # a small model in bfloat16
MIN_FREE_SMALL = GIB // 4  # compiled kernels
MIN_OPEN_FILES = 4096
ANSWER_SECONDS = 3.0  # a server of ours tells its version in milliseconds
TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
TIMEX_BYTES = 208


def python(deadline: float) -> Result:
    text = f"{sys.version.split()[0]}, wavefill {version('wavefill')}"
    if sys.prefix == sys.base_prefix and not Path("/.dockerenv").exists():
        return Result(
            "warn",
            f"{text}, no environment of its own",
            "its packages `server` and `runtime` may hide others: install it in a venv",
        )
    return Result("pass", text)


def memory(deadline: float, meminfo: Path = Path("/proc/meminfo")) -> Result:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return Result("warn", "free memory is not known on this system")
    free = int(found[1]) * 1024
    text = f"{free / GIB:.1f} GiB free"
    if free < MIN_FREE_MEMORY:
        return Result("fail", text, "2 GiB are needed beside the model: end other programs")
    return Result("pass", text)


def open_files(deadline: float) -> Result:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < MIN_OPEN_FILES:
        return Result(
            "warn",
            f"at most {most}, each connection takes one",
            "raise it: ulimit -Hn 65536 in a shell, LimitNOFILE= of systemd",
        )
    return Result("pass", "no limit" if most < 0 else f"up to {most:,}")


def port(host: str, number: int, deadline: float) -> Result:
    """Free, or taken by a server of ours."""
    from server.process.listener import AddressInUse, bind

    try:
        bind(host, number).close()
    except AddressInUse:
        return _who_listens(host, number, deadline)
    except OSError as error:
        return Result(
            "fail", f"{host}:{number}: {error.strerror}", "choose a --port that this user may open"
        )
    return Result("pass", f"{host}:{number} is free")


def _who_listens(host: str, number: int, deadline: float) -> Result:
    shown = f"[{host}]" if ":" in host else host
    left = max(0.1, deadline - time.monotonic() - 0.2)
    left = min(left, ANSWER_SECONDS)  # some programs say nothing to whoever connects
    # The document needs no key, and any server takes the name.
    url = f"http://{shown}:{number}/openapi.json"
    request = urllib.request.Request(url, headers={"Host": "localhost"})
    try:
        with urllib.request.urlopen(request, timeout=left) as answer:
            running = json.load(answer)["info"]
        if running["title"] != "Wavefill":
            raise ValueError("another server, such as vLLM")
        return Result(
            "pass", f"{host}:{number} is taken by a server that runs, version {running['version']}"
        )
    except (OSError, ValueError, LookupError, TypeError):
        return Result(
            "fail",
            f"{host}:{number} is taken by another program",
            "stop it, or start the server with another --port",
        )


def cache_folders() -> list[tuple[str, Path, str, int]]:
    """Name, folder, the variable that moves it, and the bytes that should be free there."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    kernels = Path(os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    return [
        ("models", Path(constants.HF_HUB_CACHE), "HF_HOME", MIN_FREE_DISK),
        ("kernels", kernels, "TRITON_CACHE_DIR", MIN_FREE_SMALL),
        ("settings", cache / "wavefill", "XDG_CACHE_HOME", MIN_FREE_SMALL),
    ]


def cache_folder(folder: Path, variable: str, wanted: int, deadline: float) -> Result:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Result(
            "fail",
            f"{folder}: {error.strerror}",
            f"set {variable} to a folder that this user may write to",
        )
    text = f"{folder}, {free / GIB:.1f} GiB free"
    if free < wanted:
        return Result("warn", text, f"make room there, or set {variable} to another folder")
    return Result("pass", text)


def clock(deadline: float) -> Result:
    """Wrong time breaks TLS to the Hub, and dates of logs and answers."""
    built = Path(__file__).stat().st_mtime  # installed before now
    now = time.time()
    if now < built - 86400:
        return Result(
            "fail",
            f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC is before this installation",
            "set the clock: timedatectl set-ntp true",
        )
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if is_synchronized() is False:
        return Result(
            "warn", f"{shown}, not synchronized", "switch NTP on: timedatectl set-ntp true"
        )
    return Result("pass", shown)


def is_synchronized() -> bool | None:
    """What the kernel says; None where it cannot be asked."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None) if sys.platform == "linux" else None
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))  # modes 0: it only reads
    return None if state < 0 else state != TIME_ERROR
