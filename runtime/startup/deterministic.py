"""--deterministic: what it takes, decided once when a model is loaded.

attention   `fixed`: pieces of keys whose borders no batch and no chunk moves; or flash1, whose
            programs have one query each
products    the columns of the weights are summed in one order for any number of rows, by kernels
            that are the same at every start
the rest    works on one row or token at a time anyway; random numbers depend on the seed and the
            position
"""

from __future__ import annotations

from model_zoo.layers.gemm.batch_invariant import use_batch_invariant_gemms
from model_zoo.model import Model
from runtime.config import ConfigError, EngineConfig

LEAST, BEFORE = (8, 0), (10, 0)  # compute capabilities whose kernels have been compared
INVARIANT = ("fixed", "flash1")


def requested_attention(requested: EngineConfig, capability: tuple[int, int] | None) -> str:
    """What to dispatch for, on a GPU of this compute capability or on a CPU, which has none.

    Raises ConfigError where --deterministic cannot be kept.
    """
    if not requested.deterministic:
        return requested.attention
    if capability is None:
        raise ConfigError(
            "--deterministic needs a CUDA GPU: a CPU's products round by the number of rows. Leave "
            "it out, or use --device cuda"
        )
    if not LEAST <= capability < BEFORE:
        raise ConfigError(
            "--deterministic is for GPUs of compute capability 8.0 to 9.0, this one has "
            f"{'.'.join(map(str, capability))}: leave it out"
        )
    if requested.attention == "auto":
        return INVARIANT[0]
    if requested.attention not in INVARIANT:
        raise ConfigError(
            f"--attention {requested.attention} rounds by what else is "
            f"in a step, and --deterministic "
            "forbids that: leave one of the two out"
        )
    return requested.attention


def use_deterministic_gemms(requested: EngineConfig, model: Model) -> None:
    """Before anything runs.  Raises ConfigError where --deterministic cannot be kept."""
    if not requested.deterministic:
        return
    try:
        use_batch_invariant_gemms(model)
    except ValueError as error:
        raise ConfigError(f"--deterministic: {error}: leave it out") from None
