"""Finds the supported model type that an unsupported model differs least from."""

from __future__ import annotations

from dataclasses import dataclass

from model_zoo.config import GEMMA, MODEL_TYPES, QWEN3_5, QWEN3_VL
from model_zoo.json_fields import Fields
from model_zoo.unsupported.reading import Reading, read
from model_zoo.unsupported.tensor_names import matched, names_of_type
from model_zoo.unsupported.topics import changes_computation

# How far a difference makes a model: a field that it must have and has not, one whose value is
# refused, one that is not known, and a tensor.
MISSING, REFUSED, UNKNOWN, TENSOR = 3, 2, 1, 1
LENIENT = {"gemma": GEMMA, "qwen3": QWEN3_5}  # by a part of the name of models near to them


@dataclass(frozen=True, slots=True)
class TensorDifferences:
    """Names of tensors, with `*` for numbers of layers."""

    lacked: frozenset[str]  # that the model type has not
    absent: frozenset[str]  # of the model type, and not of the files
    common: frozenset[str]

    @classmethod
    def of(cls, found: frozenset[str], known: frozenset[str]) -> TensorDifferences:
        names = matched(found, known)
        return cls(names - known, known - names, names & known)

    @property
    def distance(self) -> int:
        if not self.common:  # then how many names the model type has means nothing
            return 2 * len(self.lacked)
        return len(self.lacked) + len(self.absent)


@dataclass(frozen=True, slots=True)
class Differences:
    """Of an unsupported model from a supported model type."""

    reading: Reading
    unknown: tuple[str, ...]  # fields that the model type does not know
    tensors: TensorDifferences | None  # None: they were not compared

    @property
    def model_type(self) -> str:
        return self.reading.model_type

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.reading.refused, *self.reading.missing, *self.unknown)

    def distance(self, found: frozenset[str]) -> int:
        """found: the checkpoint's tensors, all of which differ if they could not be compared."""
        tensors = 2 * len(found) if self.tensors is None else self.tensors.distance
        return (
            MISSING * len(self.reading.missing)
            + REFUSED * len(self.reading.refused)
            + UNKNOWN * len(self.unknown)
            + TENSOR * tensors
        )


def find_nearest(text: Fields, found: frozenset[str]) -> Differences:
    """The model type with the fewest differences; of several, the one that the name begins with,
    then the one that knows most of the fields, then the most common one.

    found: the checkpoint's tensors; empty: they are not known.
    """
    name = str(text.get("model_type") or "")

    def rank(each: Differences) -> tuple[object, ...]:
        same = each.model_type == supported_type(text)
        named = name.startswith(each.model_type)
        shared = text.values.keys() & each.reading.asked
        return not same, each.distance(found), not named, -len(shared), each.model_type != "llama"

    # These have a default for nearly every field, and so nothing would be missing for them.
    lenient = [types for part, types in LENIENT.items() if part not in name]
    left_out = (tuple(QWEN3_VL), *lenient)  # text models alone are compared
    known = tuple(t for t in MODEL_TYPES if not any(t in types for types in left_out))
    return min((_differences(text, found, model_type) for model_type in known), key=rank)


def supported_type(text: Fields) -> str | None:
    """The text model's own type, where it is one that is supported."""
    name = str(text.get("model_type")).removesuffix("_text")
    return name if name in MODEL_TYPES else None


def _differences(text: Fields, found: frozenset[str], model_type: str) -> Differences:
    reading = read(text, model_type)
    noted = {name.partition(".")[0] for name in (*reading.refused, *reading.missing)}
    unknown = tuple(
        name
        for name in text.values
        if name not in noted | reading.asked and changes_computation(name, text.values)
    )
    tensors = None
    if found and reading.config is not None:
        tensors = TensorDifferences.of(found, names_of_type(reading.config))
    return Differences(reading, unknown, tensors)
