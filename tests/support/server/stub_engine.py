"""An engine process without a model: for tests of the launcher.

It speaks to the API processes as runtime.engine.process does, and answers every request with the
token of its name until `max_tokens`, or until SIGUSR1 ends all answers.  The environment variable
STUB_ENGINE chooses how it fails: "wrong" ends with the code of a configuration error, "broken" with
a traceback, "loading" never gets ready, "mute" never answers.  "broken 1" is engine 1 alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from runtime.engine.process import EngineProcessArgs, note_ready
from runtime.ipc.channel import Receiver, Sender
from runtime.ipc.client import CLIENT_BITS
from runtime.ipc.parent_watch import read_args
from runtime.messages import (
    Abort,
    EngineRequest,
    FromEngine,
    Progress,
    Ready,
    RequestOutput,
    StepOutput,
    ToEngine,
)
from runtime.stats import Stats

STEP_SECONDS = 0.02


def ready(epoch: int) -> Ready:
    return Ready(
        epoch=epoch,
        model_type="stub",
        device="cpu",
        dtype="float32",
        attention="mha",
        vocab_size=1000,
        max_model_len=4096,
        page_size=16,
        num_pages=1024,
        max_num_seqs=64,
        max_batched_tokens=512,
        weight_bytes=0,
        kv_bytes=0,
        load_seconds=0.0,
    )


def main() -> None:
    start = read_args(EngineProcessArgs)
    mode, _, only = os.environ.get("STUB_ENGINE", "").partition(" ")
    if only and not start.own_address.endswith(f"-{only}"):
        mode = ""
    if mode == "wrong":
        print("error: --device moon: there is none", file=sys.stderr)
        sys.exit(2)
    if mode == "broken":
        raise RuntimeError("a seeded fault")
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    receiver = Receiver(start.own_address, decoder)
    senders: list[Sender[FromEngine]] = [Sender(address) for address in start.client_addresses]

    def broadcast(message: FromEngine) -> None:
        for sender in senders:
            sender.send(message)

    broadcast(Progress("load weights", 1, 4))
    if mode == "loading":
        signal.pause()
    note_ready(start.ready_file, time.monotonic())
    broadcast(ready(start.epoch))
    left: dict[int, int] = {}
    ended: list[int] = []  # signals since the last step
    signal.signal(signal.SIGUSR1, lambda number, frame: ended.append(number))
    while True:
        for message in receiver.receive(0.0 if left else 0.2):
            if isinstance(message, EngineRequest):
                left[message.id] = message.params.max_tokens if mode != "mute" else 0
            elif isinstance(message, Abort):
                left.pop(message.id, None)
            else:
                left = {id: n for id, n in left.items() if id >> CLIENT_BITS != message.client}
                senders[message.client].send(ready(start.epoch))
        time.sleep(STEP_SECONDS)
        if ended:
            ended.clear()
            left = {id: min(count, 1) for id, count in left.items()}
        outputs = [
            RequestOutput(id, [300], finish="length" if count == 1 else None)
            for id, count in left.items()
            if count
        ]
        left = {id: max(count - 1, 0) for id, count in left.items() if count != 1}
        for index, sender in enumerate(senders):
            own = [output for output in outputs if output.id >> CLIENT_BITS == index]
            sender.send(StepOutput(own, Stats(running=len(left))))


if __name__ == "__main__":
    main()
