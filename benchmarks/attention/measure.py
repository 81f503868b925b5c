"""Measures one case: compares the results of all subjects, and times them interleaved."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from benchmarks.attention.cases import AttentionCase
from benchmarks.attention.inputs import DoesNotFit, Inputs, RandomPool, make_inputs
from benchmarks.attention.results import CaseResult, SubjectOutcome
from benchmarks.attention.subjects import PeerUnavailable, Prepared, Subject
from benchmarks.attention.timing import TimedGraph, Timer


def why(error: BaseException) -> str:
    """One line of an exception."""
    text = str(error).strip().splitlines() or [""]
    name = "" if isinstance(error, PeerUnavailable | DoesNotFit) else f"{type(error).__name__}: "
    return (name + text[0])[:160]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def measure(
    case: AttentionCase, subjects: dict[str, Subject], pool: RandomPool, timer: Timer
) -> CaseResult:
    """All subjects on one case, interleaved; a failure is an outcome with an error."""
    row = CaseResult(case)
    try:
        inputs = make_inputs(case, pool)
    except (DoesNotFit, RuntimeError) as error:
        row.outcomes.update({name: SubjectOutcome(error=why(error)) for name in subjects})
        return row
    expected: Tensor | None = None
    captured: dict[str, tuple[SubjectOutcome, TimedGraph]] = {}
    for name, subject in subjects.items():
        try:
            prepared = subject(inputs)
            found = result_of(inputs, prepared)
            difference = None
            if found is not None:
                expected = found if expected is None else expected
                difference = relative_difference(found, expected)
            outcome = SubjectOutcome(
                difference=difference,
                predicted_us=prepared.predicted_us,
                kernels=prepared.kernels,
            )
            captured[name] = (outcome, timer.capture(prepared.call, inputs.sets))
        except Exception as error:  # a peer may raise anything; the other subjects go on
            row.outcomes[name] = SubjectOutcome(error=why(error))
    samples = timer.replay([graph for _, graph in captured.values()])
    for (name, (outcome, _)), sample in zip(captured.items(), samples, strict=True):
        row.outcomes[name] = replace(outcome, us=sample.us, low=sample.low, high=sample.high)
    return row


def result_of(inputs: Inputs, prepared: Prepared) -> Tensor | None:
    """A copy of what the subject finds; None if it cannot be compared."""
    if prepared.result is None:
        return None
    inputs.out.fill_(float("nan"))  # what is not written shows
    return prepared.result().clone()
