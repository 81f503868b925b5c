"""The default pooling of a model: what its files in sentence-transformers' format say."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from server.errors import FieldPath, UnsupportedParameter

Kind = Literal["last", "mean"]
KIND_OF_MODE: dict[str, Kind] = {
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "mean": "mean",
}
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


class Module(msgspec.Struct, frozen=True):
    """One entry of modules.json."""

    type: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]


class PoolingDefault(NamedTuple):
    kind: Kind
    problem: str = ""  # why the model's own pooling is not available


REMEDY = "send `pooling` as last or mean, or start the server with --pooling"


def pooling_of(directory: str, wanted: str, asked: Kind | None, remedy: str = REMEDY) -> Kind:
    """The pooling of a request that asks for `asked`; `wanted` is the value of --pooling.

    Raises UnsupportedParameter if neither says and the model's own pooling is not supported.
    """
    if asked is not None:
        return asked
    if wanted == "last" or wanted == "mean":
        return wanted
    default = read_default(directory)
    if default.problem:
        raise UnsupportedParameter(
            "the pooling of this model is not supported by this server ({}): {}",
            (default.problem, remedy),
            param=FieldPath("pooling"),
        )
    return default.kind


@cache
def read_default(directory: str) -> PoolingDefault:
    """What modules.json and the pooling module's config.json say; the last token's state if there
    are none, as for most decoder models for embeddings."""
    folder = Path(directory)
    modules_file = folder / "modules.json"
    place = "1_Pooling"
    try:
        if directory and modules_file.is_file():
            modules = msgspec.json.decode(modules_file.read_bytes(), type=list[Module])
            unknown = [module.name for module in modules if module.name not in KNOWN_MODULES]
            if unknown:
                return PoolingDefault("last", f"modules.json has a module {unknown[0][:40]}")
            place = next((module.path for module in modules if module.name == "Pooling"), place)
        file = folder / place / "config.json"
        if not directory or not file.is_file():
            return PoolingDefault("last")
        return _from_config(msgspec.json.decode(file.read_bytes(), type=dict[str, object]))
    except (OSError, msgspec.DecodeError) as error:
        return PoolingDefault("last", f"{modules_file.name} or {place}/config.json: {error}")


def _from_config(config: dict[str, object]) -> PoolingDefault:
    """Newer files name one mode, older ones have a flag for each."""
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]  # fmt: skip
    if len(modes) == 1 and modes[0] in KIND_OF_MODE:
        return PoolingDefault(KIND_OF_MODE[modes[0]])
    return PoolingDefault("last", f"its pooling is {' and '.join(modes)[:200] or 'not named'}")
