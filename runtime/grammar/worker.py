"""The grammar process: `python -m runtime.grammar.worker`, the only one that imports llguidance.

It keeps a matcher for each constrained sequence, advances it by the tokens that the engine
committed, and answers with the masks of the next tokens.  It is a process of its own because
reading a large vocabulary holds the GIL for a second, and because a grammar that crashes llguidance
must not end the engine.

It reads one line of JSON (`GrammarProcessArgs`) from stdin, and exits when stdin ends.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from contextlib import closing

import msgspec

from runtime.grammar.matchers import TOO_SLOW, Matchers, Vocabulary
from runtime.grammar.messages import (
    Advance,
    Advanced,
    Compile,
    Compiled,
    Free,
    FromGrammarProcess,
    GrammarProcessArgs,
    ToGrammarProcess,
)
from runtime.ipc import parent_watch
from runtime.ipc.channel import Receiver, Sender, lower_priority

SLOW_WAIT_SECONDS = 10.0  # of a slow sequence for other slow ones; the engine waits twice that


def compile_loop(
    matchers: Matchers, requests: queue.SimpleQueue[Compile | Free], address: str
) -> None:
    """The compiling thread: a grammar that takes long to compile delays no masks."""
    with closing(Sender[FromGrammarProcess](address)) as sender:
        while True:
            request = requests.get()
            if isinstance(request, Free):
                matchers.free(request.key)
                continue
            try:
                compiled = matchers.compile(request)
            except Exception as error:  # it fails this request only
                traceback.print_exc()
                compiled = Compiled(request.key, error=f"internal error: {error!r}", internal=True)
            sender.send(compiled)


class SlowSequences:
    """The thread of slow sequences, whose masks the others do not wait for."""

    def __init__(self, matchers: Matchers, address: str) -> None:
        self._matchers = matchers
        self._address = address
        self._waiting: queue.SimpleQueue[tuple[float, int, list[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, key: int, tokens: list[int]) -> None:
        self._waiting.put((time.monotonic(), key, tokens))

    def _run(self) -> None:
        with closing(Sender[FromGrammarProcess](self._address)) as sender:
            while True:
                since, key, tokens = self._waiting.get()
                sender.send(self._advance(since, key, tokens))

    def _advance(self, since: float, key: int, tokens: list[int]) -> Advanced:
        if time.monotonic() - since > SLOW_WAIT_SECONDS:
            return Advanced({}, errors={key: TOO_SLOW})
        try:
            return self._matchers.advance([(key, tokens)])
        except Exception as error:  # it fails this request only
            traceback.print_exc()
            return Advanced({}, errors={key: f"internal error: {error!r}"})


def advance(matchers: Matchers, message: Advance, slow: SlowSequences) -> Advanced:
    """Advance the quick sequences, and leave the slow ones to their thread."""
    quick: list[tuple[int, list[int]]] = []
    for key, tokens in message.tokens:
        if matchers.is_slow(key):
            slow.put(key, tokens)
        else:
            quick.append((key, tokens))
    return matchers.advance(quick)


def serve(args: GrammarProcessArgs) -> None:
    matchers = Matchers(Vocabulary(args.tokenizer_file, args.vocab_size), args.threads)
    requests: queue.SimpleQueue[Compile | Free] = queue.SimpleQueue()
    decoder: msgspec.msgpack.Decoder[ToGrammarProcess] = msgspec.msgpack.Decoder(ToGrammarProcess)
    arguments = (matchers, requests, args.engine_address)
    threading.Thread(target=compile_loop, args=arguments, daemon=True).start()
    slow = SlowSequences(matchers, args.engine_address)
    with (
        closing(Receiver(args.own_address, decoder)) as receiver,
        closing(Sender[FromGrammarProcess](args.engine_address)) as sender,
    ):
        while True:
            for message in receiver.receive(1.0):
                if isinstance(message, Advance):
                    sender.send(advance(matchers, message, slow))
                else:
                    requests.put(message)  # in order: a Free after the Compile of its key


def main() -> None:
    lower_priority()  # otherwise, with no core free, `send` of the engine would block
    serve(parent_watch.read_args(GrammarProcessArgs))


if __name__ == "__main__":
    main()
