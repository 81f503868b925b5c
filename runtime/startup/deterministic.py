"""--deterministic: batch-invariant kernels, chosen once when a model is loaded.

attention   `batch-invariant`: KV splits at boundaries that do not depend on the batch or chunks; or
            flash1, whose programs have one query each
delta nets  token after token, so that rows may be cut anywhere; with states in float32, which are
            not rounded between them
GEMMs       one order of summation for any number of rows, by the same kernels at every start
the rest    works on one row or token at a time anyway; random numbers depend on the seed and the
            position
"""

from __future__ import annotations

from model_zoo.layers.delta_net.block import use_token_by_token
from model_zoo.layers.gemm.batch_invariant import use_batch_invariant_gemms
from model_zoo.model import Model
from runtime.config import ConfigError, EngineConfig

LEAST, BEFORE = (8, 0), (10, 0)  # compute capabilities on which the kernels have been compared
INVARIANT = ("batch-invariant", "flash1")


def requested_attention(requested: EngineConfig, capability: tuple[int, int] | None) -> str:
    """The `--attention` to dispatch for, on a GPU of this compute capability or on a CPU (None).

    Raises ConfigError where --deterministic cannot be kept.
    """
    if not requested.deterministic:
        return requested.attention
    if capability is None:
        raise ConfigError(
            "--deterministic needs a CUDA GPU: GEMMs on a CPU round differently with the number of "
            "rows. Leave it out, or use --device cuda"
        )
    if not LEAST <= capability < BEFORE:
        raise ConfigError(
            "--deterministic is for GPUs of compute capability 8.0 to 9.0, this one has "
            f"{'.'.join(map(str, capability))}: leave it out"
        )
    if requested.state_dtype == "bfloat16":
        raise ConfigError(
            "--deterministic with --state-dtype bfloat16: states are rounded after each step, so "
            "that answers depend on how prompts are cut: leave one of the two out"
        )
    if requested.attention == "auto":
        return INVARIANT[0]
    if requested.attention not in INVARIANT:
        raise ConfigError(
            f"--attention {requested.attention} is not batch-invariant, as --deterministic "
            "requires: leave one of the two out"
        )
    return requested.attention


def use_deterministic_gemms(requested: EngineConfig, model: Model) -> None:
    """Call it before the model runs.  Raises ConfigError where --deterministic cannot be kept."""
    if not requested.deterministic:
        return
    use_token_by_token(model)
    try:
        use_batch_invariant_gemms(model)
    except ValueError as error:
        raise ConfigError(f"--deterministic: {error}: leave it out") from None
