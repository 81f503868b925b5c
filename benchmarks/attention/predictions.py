"""How well the planners' simulation predicts measured times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.attention.results import FA3_PLAN, GREEDY_PLAN, OURS, PLAIN, CaseResult
from benchmarks.attention.targets import geometric_mean

PLANS = (PLAIN, GREEDY_PLAN, FA3_PLAN)  # of one kernel
ALIKE = 1.02  # plans that differ by less take the same time


def predictions(rows: Sequence[CaseResult]) -> Iterator[str]:
    """Predicted over measured time of each plan; how often the best predicted plan is best."""
    cold = [row for row in rows if not row.case.warm]
    for subject in (OURS, *PLANS):
        pairs = [
            (row.outcomes[subject].predicted_us, us)
            for row in cold
            if (us := row.us(subject)) and row.outcomes[subject].predicted_us
        ]
        if len(pairs) < 3:
            continue
        ratios = [predicted / us for predicted, us in pairs]
        logs = [(math.log(predicted), math.log(us)) for predicted, us in pairs]
        correlation = statistics.correlation(*zip(*logs, strict=True))
        yield (
            f"predicted over measured, {subject}: geometric mean {geometric_mean(ratios):.3f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f}, correlation of logarithms {correlation:.4f}, "
            f"{len(pairs)} cases"
        )
    right = wrong = 0
    for row in cold:
        times = {subject: us for subject in PLANS if (us := row.us(subject))}
        if len(times) == len(PLANS):
            best = min(times, key=lambda subject: row.outcomes[subject].predicted_us)
            right += times[best] <= min(times.values()) * ALIKE
            wrong += times[best] > min(times.values()) * ALIKE
    if right + wrong:
        yield (
            f"the plan predicted to be best is within {ALIKE - 1:.0%} of the best measured one "
            f"in {right} of {right + wrong} cases"
        )
