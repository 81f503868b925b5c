"""The answer to one Responses request: the response object and its events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import orjson

from server.apis.responses.items import JsonItem
from server.apis.responses.output import Events, OutputItems
from server.apis.responses.schema import ResponsesRequest, TextConfig
from server.apis.responses.tools_schema import ResponsesCustomTool, ResponsesFunctionTool
from server.errors import RequestError
from server.generation.answer_text import ScoredToken
from server.generation.choice import Chunk
from server.generation.generation import Generation
from server.generation.logprobs import chat_logprobs
from server.http.request_context import note_error
from server.http.sse import FrameSink, FrameWriter
from server.http.validation import fields_of
from server.state import ServerState

Write = Callable[[bytes], Awaitable[None]]
Keep = Callable[[JsonItem], Awaitable[None]]


class ResponseAnswer:
    """Follows a chat's answer; `response` is the response object in its current state."""

    def __init__(
        self, state: ServerState, body: ResponsesRequest, generation: Generation, keep: Keep
    ) -> None:
        """`keep(response)` is awaited before the caller learns that the response has ended."""
        self.events = Events()
        self.generation = generation
        self.response = new_response(f"resp_{generation.name}", state, body)
        self._tokenizer = state.tokenizer
        self._body = body
        self._keep = keep
        self._output = OutputItems(self.events, self._scores)
        self._cut = False

    async def whole(self) -> JsonItem:
        """The response when it has ended.  Raises RequestError if the engine fails."""

        await self.generation.stream([self])
        self._ended()
        await self._keep(self.response)
        return self.response

    def put(self, chunk: Chunk) -> bool:
        """For `whole`: follow a chunk whose events are not sent."""
        self._render(chunk)
        return True

    async def room(self) -> None:
        """There always is."""

    async def stream(self, writer: FrameWriter) -> None:
        """Write all events; the last one reports a failure of the engine."""
        write = writer.write
        await write(self._started())
        try:
            await self.generation.stream([FrameSink(writer, self._render)])
        except RequestError as error:
            note_error(error.code)
            await self.failed(write, error.message)
            return
        last = self._ended()
        await self._keep(self.response)
        await write(last + self._event(f"response.{self.response['status']}"))

    async def failed(
        self, write: Write, message: str = "the server failed on this request"
    ) -> None:
        """Write the last events of a response that failed."""
        data = self._output.close("incomplete")
        self.response |= {
            "status": "failed",
            "output": self._output.items(),
            "error": {"code": "server_error", "message": message},
        }
        await self._keep(self.response)
        await write(data + self._event("response.failed"))

    async def cancelled(self, write: Write) -> None:
        """Write the last events of a response that was cancelled."""
        data = self._output.close("incomplete")
        self.response |= {"status": "cancelled", "output": self._output.items()}
        await write(data + self._event("response.incomplete"))

    def _started(self) -> bytes:
        return self._event("response.created") + self._event(f"response.{self.response['status']}")

    def _render(self, chunk: Chunk) -> bytes:
        data = b""
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            data = self._event("response.in_progress")
        self._cut = chunk.finish == "length"
        return data + self._output.feed(chunk)

    def _ended(self) -> bytes:
        status = "incomplete" if self._cut else "completed"
        data = self._output.end(status)
        self.response |= {
            "status": status,
            "output": self._output.items(),
            "usage": usage_of(self.generation.usage()),
        }
        if self._cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return data

    def _event(self, kind: str) -> bytes:
        return self.events.frame(kind, {"response": self.response})

    def _scores(self, scored: Sequence[ScoredToken]) -> list[orjson.Fragment]:
        if not self._body.wants_logprobs:
            return []
        return chat_logprobs(self._tokenizer, scored, self._body.top_logprobs or 0)


def new_response(id: str, state: ServerState, body: ResponsesRequest) -> JsonItem:
    """The response object before anything is generated: the request's settings and defaults."""
    defaults = state.tokenizer.defaults
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.stored,
        "temperature": 1.0 if temperature is None else temperature,
        "text": _text(body),
        "tool_choice": _tool_choice(body),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if top_p is None else top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _text(body: ResponsesRequest) -> JsonItem:
    text = body.text or TextConfig()
    format = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True)
    return {"format": format, "verbosity": text.verbosity or "medium"}


def _tool_choice(body: ResponsesRequest) -> object:
    choice = body.tool_choice
    return choice or "auto" if isinstance(choice, str | None) else choice.model_dump()


def _tool(tool: ResponsesFunctionTool | ResponsesCustomTool) -> JsonItem:
    if isinstance(tool, ResponsesFunctionTool):
        return dict(tool) | {"strict": bool(tool.strict)}
    format = {"type": "text"} if tool.format is None else tool.format.model_dump(exclude_none=True)
    return dict(tool) | {"format": format}


def usage_of(usage: dict[str, object]) -> dict[str, object]:
    """The usage of a chat completion, as the Responses API names its fields."""
    prompt = fields_of(usage["prompt_tokens_details"])
    completion = fields_of(usage["completion_tokens_details"])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
