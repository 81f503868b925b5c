"""QuantizationConfig: which Linears of a checkpoint are quantized, and how.  Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from model_zoo.json_fields import Fields
from model_zoo.quantization.name_patterns import NamePatterns, Plain
from model_zoo.quantization.stored_format import StoredFormat

# The tables that most methods leave alone without listing them.
EMBEDDINGS = ("lm_head", "embed_tokens")


@dataclass(frozen=True, slots=True)
class Rule:
    """How the Linears that match are stored; None: not quantized."""

    names: NamePatterns
    stored: StoredFormat | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """The first rule that matches a name decides."""

    method: str  # the quant_method, as config.json spells it
    path: Path  # of the file it was read from
    rules: tuple[Rule, ...]
    otherwise: StoredFormat | None

    def stored(self, module_name: str) -> StoredFormat | None:
        """How the Linear is stored by the lists of names; None: not quantized.

        The tensors that are in the files decide in doubt: see readers/resolve.py.
        """
        for rule in self.rules:
            if rule.names.match(module_name):
                return rule.stored
        return self.otherwise

    def formats(self) -> tuple[StoredFormat, ...]:
        """All that occur, each once."""
        found = [*(rule.stored for rule in self.rules), self.otherwise]
        return tuple(dict.fromkeys(stored for stored in found if stored is not None))


def rule(
    fields: Fields, name: str, entries: Iterable[str], plain: Plain, stored: StoredFormat | None
) -> Rule:
    """The rule of a list of names, which is the field `name`.

    Raises ModelError for a regular expression that is none.
    """
    entries = tuple(entries)
    try:
        return Rule(NamePatterns.parse(entries, plain), stored)
    except re.error as error:
        raise fields.error(name, list(entries), f"not a regular expression: {error}") from None


def exclusions(fields: Fields, names: tuple[str, ...], plain: Plain) -> list[Rule]:
    """The rules of lists of modules that are not quantized, for each field that is there."""
    return [
        rule(fields, name, fields.strings(name), plain, None) for name in names if fields.get(name)
    ]


def spelled(fields: Fields, *names: str) -> str:
    """The spelling of a field that is used; the first if none is."""
    return next((name for name in names if fields.get(name) is not None), names[0])
