"""--tensor-parallel auto: the number of ranks, which the engine process asks for before it starts.

The question is answered in a process of its own, which needs PyTorch and some memory of each GPU.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import msgspec
from msgspec.structs import replace

from runtime.config import UNDIVIDED_EXPERTS, EngineConfig
from runtime.logs import print_error

MODULE = "runtime.startup.fit.choose_ranks"


class ChosenRanks(msgspec.Struct, frozen=True):
    """What the process answers."""

    ranks: int
    reason: str


def with_chosen_ranks(
    config: EngineConfig, *, has_driver: bool, again: bool = False
) -> tuple[EngineConfig, str]:
    """-> (the configuration with a number of ranks, why it is that; "" if it was requested).

    has_driver: this machine may have GPUs
    again: the engine has run before, and may have left memory in use that is free a little later
    Ends this process where the model fits no number of the GPUs: the other one has said so.
    """
    if config.tensor_parallel:
        return config, ""
    if config.device == "cpu" or not has_driver:
        chosen = ChosenRanks(1, "on a CPU more processes only share its cores")
    else:
        command = [sys.executable, "-P", "-m", MODULE]
        question = msgspec.json.encode(config) + b"\n"
        answer = subprocess.run(command, input=question, stdout=subprocess.PIPE)
        if answer.returncode < 0:
            name = signal.Signals(-answer.returncode).name
            print_error(
                "--tensor-parallel auto: the process that asks the GPUs for their memory ended "
                f"with signal {name}: the system may have run out of memory, see `dmesg`"
            )
            raise SystemExit(1)
        if answer.returncode:
            raise SystemExit(1 if again else answer.returncode)  # 2 would be final
        chosen = msgspec.json.decode(answer.stdout, type=ChosenRanks)
    alone = UNDIVIDED_EXPERTS if config.expert_parallel and chosen.ranks == 1 else ""
    return replace(config, tensor_parallel=chosen.ranks), chosen.reason + alone
