"""How a model's vectors are made: what its files say, as sentence-transformers writes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from server.errors import UnsupportedParameter

Kind = Literal["last", "mean"]
MODES: dict[str, Kind] = {
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "mean": "mean",
}
KNOWN = ("Transformer", "Pooling", "Normalize")


class Module(msgspec.Struct, frozen=True):
    """One entry of modules.json."""

    type: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]


class Default(NamedTuple):
    kind: Kind
    problem: str = ""  # why the model's own way is not available


ASK = "send `pooling` as last or mean, or start the server with --pooling"


def pooling_of(directory: str, wanted: str, asked: Kind | None, remedy: str = ASK) -> Kind:
    """What to do for a request that asks for `asked`; `wanted` is the value of --pooling.

    Raises UnsupportedParameter if nobody chose and the model's own way is one that we lack.
    """
    if asked is not None:
        return asked
    if wanted == "last" or wanted == "mean":
        return wanted
    default = read_default(directory)
    if default.problem:
        raise UnsupportedParameter(
            f"this model's vectors are made in a way that this server lacks ({default.problem}): "
            f"{remedy}",
            param="pooling",
        )
    return default.kind


@cache
def read_default(directory: str) -> Default:
    """What modules.json and the pooling module's config.json say; the last token's state if there
    are none, as decoder models for embeddings do it."""
    folder = Path(directory)
    modules_file = folder / "modules.json"
    place = "1_Pooling"
    try:
        if directory and modules_file.is_file():
            modules = msgspec.json.decode(modules_file.read_bytes(), type=list[Module])
            unknown = [module.name for module in modules if module.name not in KNOWN]
            if unknown:
                return Default("last", f"modules.json has a module {unknown[0][:40]}")
            place = next((module.path for module in modules if module.name == "Pooling"), place)
        file = folder / place / "config.json"
        if not directory or not file.is_file():
            return Default("last")
        return _from_config(msgspec.json.decode(file.read_bytes(), type=dict[str, object]))
    except (OSError, msgspec.DecodeError) as error:
        return Default("last", f"{modules_file.name} or {place}/config.json: {error}")


def _from_config(config: dict[str, object]) -> Default:
    """Newer files name one mode, older ones have a flag for each."""
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]  # fmt: skip
    if len(modes) == 1 and modes[0] in MODES:
        return Default(MODES[modes[0]])
    return Default("last", f"its pooling is {' and '.join(modes)[:200] or 'not told'}")
