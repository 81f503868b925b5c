"""The grammar process: `python -m runtime.grammar.worker`, the only one that imports llguidance.

It keeps a matcher for each constrained sequence, advances it by the tokens that the engine
committed, and answers with the masks of the next tokens.  It is a process of its own because
reading a large vocabulary holds the GIL for a second, and because a grammar that crashes llguidance
must not end the engine.

It reads one line of JSON (`GrammarProcessArgs`) from stdin, and exits when stdin ends.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from contextlib import closing, suppress

import msgspec

from runtime.grammar.matchers import Matchers, Vocabulary
from runtime.grammar.messages import (
    Advance,
    Compile,
    Compiled,
    Free,
    FromGrammarProcess,
    GrammarProcessArgs,
    ToGrammarProcess,
)
from runtime.ipc import parent_watch
from runtime.ipc.channel import Receiver, Sender


def compile_loop(
    matchers: Matchers, requests: queue.SimpleQueue[Compile | Free], address: str
) -> None:
    """The compiling thread: a grammar that takes long to compile delays no masks."""
    with closing(Sender[FromGrammarProcess](address)) as sender:
        while True:
            request = requests.get()
            if isinstance(request, Free):
                matchers.free(request.keys)
            else:
                sender.send(compile_one(matchers, request))


def compile_one(matchers: Matchers, request: Compile) -> Compiled:
    """Compile one grammar.  An exception fails this request only, and the thread lives on."""
    try:
        return matchers.compile(request)
    except Exception as error:
        traceback.print_exc()
        return Compiled(request.key, error=f"internal error: {error!r}", internal=True)


def serve(args: GrammarProcessArgs) -> None:
    matchers = Matchers(Vocabulary(args.tokenizer_file, args.vocab_size), args.threads)
    requests: queue.SimpleQueue[Compile | Free] = queue.SimpleQueue()
    decoder: msgspec.msgpack.Decoder[ToGrammarProcess] = msgspec.msgpack.Decoder(ToGrammarProcess)
    arguments = (matchers, requests, args.engine_address)
    threading.Thread(target=compile_loop, args=arguments, daemon=True).start()
    with (
        closing(Receiver(args.own_address, decoder)) as receiver,
        closing(Sender[FromGrammarProcess](args.engine_address)) as sender,
    ):
        while True:
            for message in receiver.receive(1.0):
                if isinstance(message, Advance):
                    sender.send(matchers.advance(message.tokens))
                else:
                    requests.put(message)  # in order: a Free after the Compile of its key


def lower_priority() -> None:
    """Waking up preempts no other thread: otherwise, with no core free, `send` of the engine would
    block."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    lower_priority()
    serve(parent_watch.read_args(GrammarProcessArgs))


if __name__ == "__main__":
    main()
