"""Mailbox: the outputs of one request on their way to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from runtime.messages import EngineRequest, RequestOutput


def merged(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two consecutive outputs merged into one, which reuses the lists of `first`."""
    first.tokens.extend(then.tokens)
    logprobs = first.logprobs
    if logprobs is None:
        logprobs = then.logprobs
    elif then.logprobs is not None:
        logprobs.extend(then.logprobs)
    prompt_logprobs = first.prompt_logprobs
    return msgspec.structs.replace(
        then,
        tokens=first.tokens,
        logprobs=logprobs,
        prompt_logprobs=then.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        cached=first.cached or then.cached,
        started=first.started or then.started,
    )


class Mailbox:
    """The outputs of one request, for one reader."""

    __slots__ = (
        "_callback", "_output", "_waiter", "aborted", "delivered", "engine", "engines_lost",
        "request", "stopped",
    )  # fmt: skip

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.delivered = False  # the reader has seen an output: the request cannot be run again
        self.aborted = False
        self.stopped = False  # by the end of this server: another one could answer the request
        self.engine: int | None = None  # the index of the one that has it; None: it waits for one
        self.engines_lost = 0  # that ended while they had it
        self._output: RequestOutput | None = None
        self._callback: Callable[[RequestOutput], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def id(self) -> int:
        """The id for `EngineClient.abort`; it changes if the request is run again."""
        return self.request.id

    @property
    def arrived(self) -> float:
        """When the request was submitted, on the monotonic clock."""
        return self.request.arrived

    async def get(self) -> RequestOutput:
        """Wait for the next output.  After the one with `finish` set there is none."""
        while self._output is None:
            await self._wait()
        output, self._output = self._output, None
        self.delivered = True
        return output

    async def drain(self, callback: Callable[[RequestOutput], bool]) -> None:
        """Call `callback` with every output as it arrives, until it returns False.

        What `callback` raises is raised here.
        """
        while self._output is not None:
            if not callback(await self.get()):
                return
        self._callback = callback
        try:
            await self._wait()
        finally:
            self._callback = None

    async def _wait(self) -> None:
        assert self._waiter is None, "a mailbox has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def put(self, output: RequestOutput) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._output = output if self._output is None else merged(self._output, output)
            return
        if self._callback is None:
            self._output = output
            waiter.set_result(None)
            return
        self.delivered = True
        try:
            if not self._callback(output):
                waiter.set_result(None)
        except Exception as error:
            waiter.set_exception(error)

    def reset(self, id: int) -> None:
        """Drop the undelivered output: the request runs again, under a new id."""
        self.request = msgspec.structs.replace(self.request, id=id)
        self.engine = None
        self._output = None
