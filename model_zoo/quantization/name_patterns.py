"""NamePatterns: the lists of module names in quantization configs, and what they match."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self

# What a plain entry, one without wildcards, has to be: the whole name, some of the components
# between its dots, or any part of it.
Plain = Literal["name", "components", "substring"]
# The same Linear has other prefixes in the files, in the module tree of transformers, and in that
# of its text model alone.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
LONGEST = PREFIXES[:2]  # names with the other prefixes are the ends of names with these
# Projections that several runtimes join, by their joint name.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
CLASS_NAMES = ("Linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear")
REGEX = "re:"  # starts a regular expression of compressed-tensors
REGEX_CHARACTERS = frozenset(r"\^$()[]{}|+")  # none of which is in a name or a wildcard
WILDCARDS = frozenset("*?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamePatterns:
    """Patterns of module names, any of which may match."""

    names: frozenset[str] = frozenset()
    components: frozenset[str] = frozenset()
    substrings: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    regexes: tuple[re.Pattern[str], ...] = ()  # match from the start of a name
    every_linear: bool = False

    @classmethod
    def parse(cls, entries: Iterable[str], plain: Plain) -> Self:
        """The entries of a list: `re:` and a regular expression, the class name Linear, a shell
        wildcard, an expression without `re:`, or a plain name.

        Raises re.error for an expression that is none.
        """
        plain_entries: list[str] = []
        prefixes: list[str] = []
        regexes: list[re.Pattern[str]] = []
        every_linear = False
        for entry in entries:
            if entry.startswith(REGEX):
                regexes.append(re.compile(entry.removeprefix(REGEX)))
            elif entry in CLASS_NAMES:
                every_linear = True
            elif REGEX_CHARACTERS & set(entry):
                regexes.append(re.compile(entry))
            elif entry.endswith("*") and not WILDCARDS & set(entry[:-1]):
                prefixes.append(entry[:-1])  # hundreds at times, so not by an expression
            elif WILDCARDS & set(entry):
                regexes.append(_from_wildcard(entry))
            else:
                plain_entries.append(entry)
        return cls(
            names=frozenset(plain_entries if plain == "name" else ()),
            components=frozenset(plain_entries if plain == "components" else ()),
            substrings=tuple(plain_entries if plain == "substring" else ()),
            prefixes=tuple(prefixes),
            regexes=tuple(regexes),
            every_linear=every_linear,
        )

    def match(self, name: str) -> bool:
        """Whether a Linear of this name, in any of the trees, is meant."""
        if self.every_linear:
            return True
        names = aliases(name)
        if self.names and not self.names.isdisjoint(names):
            return True
        if self.components and not self.components.isdisjoint(_runs(name)):
            return True
        if any(part in alias for part in self.substrings for alias in names):
            return True
        if any(alias.startswith(self.prefixes) for alias in names):
            return True
        return any(
            regex.match(alias)
            for regex in self.regexes
            # One that says what must not be in a name would match one alias or another.
            for alias in (names[:1] if _is_negative(regex) else names)
        )


def aliases(name: str) -> list[str]:
    """The names that one Linear has in all trees, its own first."""
    core = name
    for prefix in PREFIXES:
        if prefix and name.startswith(prefix):
            core = name.removeprefix(prefix)
            break
    outer, dot, last = core.rpartition(".")
    cores = [core] + ([outer + dot + FUSED[last]] if last in FUSED else [])
    found = [prefix + alias for alias in cores for prefix in PREFIXES]
    return list(dict.fromkeys([name, *found]))


@lru_cache(maxsize=1)  # a config has several lists
def _runs(name: str) -> frozenset[str]:
    """`a.b.c` -> a, a.b, a.b.c, b, b.c and c, and those of the other aliases."""
    found: set[str] = set()
    for alias in aliases(name):
        if not alias.startswith(LONGEST) and alias != name:
            continue  # a run of one of these
        parts = alias.split(".")
        for first in range(len(parts)):
            for last in range(first + 1, len(parts) + 1):
                found.add(".".join(parts[first:last]))
    return frozenset(found)


def _from_wildcard(entry: str) -> re.Pattern[str]:
    """A shell wildcard matches a module's whole name, and so all modules within it."""
    escaped = re.escape(entry).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(rf"{escaped}(?:\..*)?\Z")


def _is_negative(regex: re.Pattern[str]) -> bool:
    return "(?!" in regex.pattern or "(?<!" in regex.pattern
