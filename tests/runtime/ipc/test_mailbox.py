"""Mailboxes: waiting outputs are merged; a reader that drains gets each at once, in order."""

from __future__ import annotations

import asyncio

import pytest

from runtime.ipc.mailbox import Mailbox, merged
from runtime.messages import EngineRequest, RequestOutput, SamplingParams, TokenLogprob

PARAMS = SamplingParams(max_tokens=16)


async def get(mailbox: Mailbox) -> RequestOutput:
    return await asyncio.wait_for(mailbox.get(), 5)


def test_merging_keeps_every_logprob_in_order() -> None:
    score = [TokenLogprob(-float(number), number, []) for number in range(4)]
    first = RequestOutput(1, [], prompt_logprobs=[None, score[0]])
    second = RequestOutput(1, [4], logprobs=[score[1]])
    third = RequestOutput(1, [5, 6], logprobs=[score[2], score[3]], finish="length")
    assert merged(merged(first, second), third) == RequestOutput(
        1,
        [4, 5, 6],
        finish="length",
        logprobs=[score[1], score[2], score[3]],
        prompt_logprobs=[None, score[0]],
    )


def mailbox_of(id: int) -> Mailbox:
    return Mailbox(EngineRequest(id, 0, [1], PARAMS))


async def test_outputs_are_poured_in_order_those_that_waited_first() -> None:
    mailbox, taken = mailbox_of(1), []

    def take(output: RequestOutput) -> bool:
        taken.append(output.tokens)
        return output.finish is None

    mailbox.put(RequestOutput(1, [1]))
    mailbox.put(RequestOutput(1, [2]))
    pouring = asyncio.ensure_future(mailbox.drain(take))
    await asyncio.sleep(0)
    for token in (3, 4):
        mailbox.put(RequestOutput(1, [token]))
        assert taken[-1] == [token], "a reader that can take it is called at once"
    mailbox.put(RequestOutput(1, [5], finish="stop"))
    await asyncio.wait_for(pouring, 5)
    assert taken == [[1, 2], [3], [4], [5]] and mailbox.delivered


async def test_what_comes_when_pouring_has_stopped_waits_for_the_reader() -> None:
    mailbox = mailbox_of(1)
    pouring = asyncio.ensure_future(mailbox.drain(lambda output: False))
    await asyncio.sleep(0)
    for token in range(4):
        mailbox.put(RequestOutput(1, [token]))
    await asyncio.wait_for(pouring, 5)
    assert (await get(mailbox)).tokens == [1, 2, 3]


async def test_what_a_taker_raises_reaches_the_one_who_pours() -> None:
    mailbox = mailbox_of(1)

    def take(output: RequestOutput) -> bool:
        raise ZeroDivisionError

    pouring = asyncio.ensure_future(mailbox.drain(take))
    await asyncio.sleep(0)
    mailbox.put(RequestOutput(1, [1]))
    mailbox.put(RequestOutput(1, [2]))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(pouring, 5)
    assert (await get(mailbox)).tokens == [2]


async def test_a_taker_that_was_cancelled_is_not_called_again() -> None:
    mailbox, taken = mailbox_of(1), []

    def take(output: RequestOutput) -> bool:
        taken.append(output)
        return True

    pouring = asyncio.ensure_future(mailbox.drain(take))
    await asyncio.sleep(0)
    pouring.cancel()
    mailbox.put(RequestOutput(1, [1]))  # before the task has heard of it
    await asyncio.gather(pouring, return_exceptions=True)
    mailbox.put(RequestOutput(1, [2]))
    assert taken == [] and (await get(mailbox)).tokens == [1, 2]
