"""A stub of PyTorch, for importing modules where importing PyTorch would take too long.

Kernels share a module with the functions that launch them, which need PyTorch; the kernels do not.
The stub has every name that a module uses while it is imported, and no behaviour.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        return _named(cls, name)

    def __repr__(cls) -> str:
        return f"torch.{cls.__name__}"  # Triton identifies types by it


class _Anything(metaclass=_Names):
    """A class to derive from, a function to call, a decorator or a context that changes nothing."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __call__(self, decorated: object = None) -> object:
        return decorated

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(self, name)


def _named(owner: object, name: str) -> type:
    """A class of that name, stored so that each access returns the same."""
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Names(name, (_Anything,), {})
    setattr(owner, name, made)
    return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "torch":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install_torch_stub() -> None:
    """For the whole process; it cannot be removed."""
    assert "torch" not in sys.modules
    sys.meta_path.insert(0, _Finder())
