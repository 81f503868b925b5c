"""A conversation as a submitted chat turn, cut to the context if the caller wishes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from server.apis.openai.chat_schema import ChatRequest
from server.apis.responses.items import JsonItem
from server.apis.responses.schema import ResponsesRequest
from server.apis.responses.translate import Conversation, chat_request, conversation_of
from server.errors import ContextTooLong, RequestError
from server.generation.admission import AdmissionSlots
from server.generation.chat_request import ChatGeneration, chat_prompt, prepare_chat
from server.generation.off_loop import off_loop
from server.state import ServerState

T = TypeVar("T")

ROUTE = "responses"  # as records of requests say
WORK_OF_ITEM = 256  # characters that take as long to look through as an item


async def joined(
    body: ResponsesRequest, earlier: list[JsonItem], items: list[JsonItem]
) -> Conversation:
    """conversation_of, off the event loop if there is much of it."""
    size = WORK_OF_ITEM * (len(earlier) + len(items))
    return await off_loop(size, lambda: conversation_of(body, earlier, items))


async def prepare(
    state: ServerState,
    body: ResponsesRequest,
    conversation: Conversation,
    salt: bytes,
    slots: AdmissionSlots,
) -> ChatGeneration:
    """Submit it to the one of `slots`.  Raises as prepare_chat does, in this route's words."""

    async def submit(chat: ChatRequest) -> ChatGeneration:
        return await prepare_chat(state, chat, salt, ROUTE, slots=slots)

    return await _fitting(state, body, conversation, submit)


async def count_tokens(
    state: ServerState, body: ResponsesRequest, conversation: Conversation
) -> int:
    """The tokens of its prompt.  Raises as prepare_chat does."""

    async def count(chat: ChatRequest) -> int:
        return len((await chat_prompt(state, chat))[1])

    return await _fitting(state, body, conversation, count)


async def _fitting(
    state: ServerState,
    body: ResponsesRequest,
    conversation: Conversation,
    work: Callable[[ChatRequest], Awaitable[T]],
) -> T:
    """work(chat), with `truncation` auto on as many of the last messages as fit."""
    chat = await _chat(body, conversation)
    try:
        if body.truncation == "auto" and not await _fits(state, body, chat):
            conversation = await _cut(state, body, conversation)
            chat = await _chat(body, conversation)
        return await work(chat)
    except RequestError as error:
        raise conversation.own_words(error) from None


async def _cut(
    state: ServerState, body: ResponsesRequest, conversation: Conversation
) -> Conversation:
    """Without the fewest of the first messages; each cut is before a message of the user's."""
    cuts = conversation.cuts()
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        shorter = conversation.without(cuts[middle])
        if await _fits(state, body, await _chat(body, shorter)):
            high = middle
        else:
            low = middle + 1
    return conversation.without(cuts[low]) if cuts else conversation


async def _chat(body: ResponsesRequest, conversation: Conversation) -> ChatRequest:
    size = WORK_OF_ITEM * len(conversation.messages)
    return await off_loop(size, lambda: chat_request(body, conversation))


async def _fits(state: ServerState, body: ResponsesRequest, chat: ChatRequest) -> bool:
    try:
        ready, tokens = await chat_prompt(state, chat)
    except ContextTooLong:
        return False
    return len(tokens) + (body.max_output_tokens or 1) <= ready.max_model_len
