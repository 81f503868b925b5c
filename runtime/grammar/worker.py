"""The grammar process: `python -m runtime.grammar.worker`, which alone holds the grammar library.

It keeps a matcher for each constrained sequence, takes the tokens that the engine committed and
says which tokens may come next.  It is a process of its own because reading a large vocabulary
holds Python's lock for a second, and because what a caller's grammar does to the library must not
end the engine.

It reads one line of JSON (a `Start`) from stdin, and takes the end of stdin as the death of its
parent.
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
    FromWorker,
    GrammarProcessArgs,
    ToWorker,
)
from runtime.ipc import parent_watch
from runtime.ipc.channel import Receiver, Sender


def compile_sequentially(
    matchers: Matchers, requests: queue.SimpleQueue[Compile | Free], address: str
) -> None:
    """The compiling thread: a grammar that takes long keeps nobody from getting masks."""
    with closing(Sender[FromWorker](address)) as sender:
        while True:
            request = requests.get()
            if isinstance(request, Free):
                matchers.free(request.keys)
            else:
                sender.send(compiled(matchers, request))


def compiled(matchers: Matchers, request: Compile) -> Compiled:
    """What goes wrong ends this request alone: without the thread, all later ones would wait."""
    try:
        return matchers.compile(request)
    except Exception as error:
        traceback.print_exc()
        return Compiled(request.key, error=f"internal error: {error!r}", internal=True)


def serve(start: GrammarProcessArgs) -> None:
    matchers = Matchers(Vocabulary(start.tokenizer_file, start.vocab_size), start.threads)
    requests: queue.SimpleQueue[Compile | Free] = queue.SimpleQueue()
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    arguments = (matchers, requests, start.engine_address)
    threading.Thread(target=compile_sequentially, args=arguments, daemon=True).start()
    with (
        closing(Receiver(start.own_address, decoder)) as receiver,
        closing(Sender[FromWorker](start.engine_address)) as sender,
    ):
        while True:
            for message in receiver.receive(1.0):
                if isinstance(message, Advance):
                    sender.send(matchers.advance(message.tokens))
                else:
                    requests.put(message)  # a Free stays behind the Compile of the same key


def lower_priority() -> None:
    """Waking up takes the core from nobody: with no core free, the engine would stop to send."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    lower_priority()
    serve(parent_watch.begin(GrammarProcessArgs))


if __name__ == "__main__":
    main()
