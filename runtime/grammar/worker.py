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
import traceback
from contextlib import closing

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
from runtime.ipc.channel import Receiver, Sender, lower_priority


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


def main() -> None:
    lower_priority()  # otherwise, with no core free, `send` of the engine would block
    serve(parent_watch.read_args(GrammarProcessArgs))


if __name__ == "__main__":
    main()
