"""From the name of a model to a local directory with its files."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import re
import stat
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from server.cli.download_progress import DownloadProgress, Report, progress_bars
from server.cli.main import UsageError
from server.cli.model_cache import mark_used

BUILT_IN = "tiny-chat"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Never pickles: they can run code when they are read.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
# With the files that say how a model is quantized where config.json does not.
CONFIG_ONLY = (
    *("config.json", "generation_config.json"),
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
)
FULL = "No space left on device"
# Of the folder that a download goes to, not of the network.
CACHE_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENOENT, errno.ENOTDIR),
}


class ModelNotFound(UsageError):
    """No model of that name is available; the message names the remedy."""


def resolve_model(
    name: str, revision: str | None = None, patterns: tuple[str, ...] = MODEL_FILES
) -> tuple[Path, str]:
    """The directory of a model, and the name it is served under; `patterns` are for the Hub.

    `name` is "tiny-chat", a directory, or a Hugging Face id, which is downloaded unless it is in
    the local cache.  Raises ModelNotFound.
    """
    local = find_local(name)
    return local or (download(name, revision, patterns), name)


def find_local(name: str) -> tuple[Path, str] | None:
    """As `resolve_model`, without a download: None for a Hub id.  Raises ModelNotFound."""
    if name == BUILT_IN:
        return built_in_directory(), BUILT_IN
    path = _expanded(name)
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        if not stat.S_ISREG(_mode(path / "config.json")):
            raise ModelNotFound(
                f"{path} holds no config.json: give a directory with config.json, *.safetensors "
                "and tokenizer.json of a model, as its Hugging Face repository has them"
            )
        return path.resolve(), path.resolve().name
    if mode:
        raise ModelNotFound(
            f"{path} is a file: give the directory with config.json and *.safetensors; other "
            "formats, such as GGUF, are not read"
        )
    if path.is_absolute() or name.startswith((".", "~")) or not HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"{name}: no such directory, and not a Hub id like Qwen/Qwen3-0.6B: "
            f"give one of them, or {BUILT_IN} for the built-in model"
        )
    return None


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~name of a user without an account here
        return Path(name)


def _mode(path: Path) -> int:
    """The st_mode of a file, 0 if there is none.  Raises ModelNotFound."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise ModelNotFound(
            f"{str(path)[:300]}: {error.strerror}: give a directory that this user may read"
        ) from None


def built_in_directory() -> Path:
    """The directory of tiny-chat, found without importing the package and PyTorch."""
    spec = importlib.util.find_spec("model_zoo")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "tiny_chat"


def download(
    name: str,
    revision: str | None = None,
    patterns: tuple[str, ...] = MODEL_FILES,
    report: Report | None = None,
) -> Path:
    """Fetch a model from the Hub, or find it in the local cache.  Raises ModelNotFound.

    `report` is called with how far it is, in threads.
    """
    from huggingface_hub import (
        constants,
        errors,
        snapshot_download,  # pyright: ignore[reportUnknownVariableType]
    )

    if not constants.HF_HUB_OFFLINE:
        _check_hub_address(name, constants.ENDPOINT)
    missing = partial(_missing_bytes, name, revision, patterns)
    # The root logger logs its messages already.
    logging.getLogger("huggingface_hub").handlers.clear()
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            tqdm_class=progress_bars(DownloadProgress(name, missing, report)),
        )
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"{name}: its owners ask for their consent: accept the terms on the model's page, "
            "then set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"{name}: the Hub has no such model, or it is private: check the name, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"{name}: no revision {revision}: check --revision") from None
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{name[:100]} cannot be a Hub id: {error}") from None
    except (errors.LocalEntryNotFoundError, OSError, RuntimeError) as error:  # Runtime: of hf_xet
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if getattr(error, "errno", None) in CACHE_ERRORS or FULL in reason:
            raise ModelNotFound(
                f"{name}: the cache {constants.HF_HUB_CACHE} cannot be written ({reason}): make "
                "room there, or set HF_HOME to a folder that has room and that this user may write"
            ) from None
        raise ModelNotFound(
            f"{name}: neither a directory nor in the local cache, and the Hub cannot be reached "
            f"({reason.removeprefix('Got: ')}): connect, or run `wavefill pull {name}` where there "
            "is a network and copy the cache (HF_HOME)"
        ) from None
    mark_used(Path(folder))
    return Path(folder)


def _check_hub_address(name: str, address: str) -> None:
    """Raises ModelNotFound where the library would fail later, with a text that names neither."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ModelNotFound(
            f"{name} cannot be looked for: the environment sets HF_ENDPOINT to {address[:100]!r}, "
            "which is no address of a Hub: unset it, or set it to one such as "
            "https://huggingface.co"
        )


def _missing_bytes(name: str, revision: str | None, patterns: tuple[str, ...]) -> int:
    """The size of all files that are to be downloaded; 0 if the Hub does not say.

    A thread that the process does not wait for at its end asks.  So it must not use the library's
    bars, whose lock it would hold for ever: the process would never end.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    with contextlib.suppress(Exception):  # it is for a percentage only
        info = HfApi().model_info(name, revision=revision or "main", files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return sum(
            sizes[path]
            for path in filter_repo_objects(sizes, allow_patterns=list(patterns))
            if not isinstance(try_to_load_from_cache(name, path, revision=info.sha), str)
        )
    return 0
