"""What the launcher tells an API process on its stdin: its arguments, then what it learns later."""

from __future__ import annotations

from msgspec import Struct

from runtime.ipc.client import EngineAddress
from server.config import ServerConfig


class ApiProcessArgs(Struct, frozen=True, kw_only=True):
    """The first line."""

    config: ServerConfig
    index: int
    engines: list[EngineAddress]  # of each, and of this process's end
    listener: int  # file descriptor
    at_once: bool  # answers before the model is loaded, if only that it is not
    taking: str  # the file that says that this process takes connections, and whether it is ready


class ModelFound(Struct, frozen=True, tag="model"):
    """Where the model's files are, if the configuration did not say it."""

    directory: str


class KeysChanged(Struct, frozen=True, tag="keys"):
    """The API keys from now on."""

    keys: tuple[str, ...]


class DownloadArgs(Struct, frozen=True, kw_only=True):
    """The first line to the process that downloads the model."""

    name: str
    revision: str
    client_addresses: list[str]  # of the API processes, which get its Progress
    result: str  # the file that gets the name of the directory
    config: ServerConfig
