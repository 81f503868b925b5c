"""The completions of one HTTP request: submission, chunks, usage, abort."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import msgspec

from runtime.messages import Ready, RequestOutput, SamplingParams
from server.apis.openai.sampling_schema import SamplingBody
from server.errors import Unavailable
from server.generation.admission import AdmissionSlots
from server.generation.answer_text import AnswerText
from server.generation.choice import Choice, Chunk
from server.generation.generated_answer import GeneratedAnswer
from server.generation.sampling_params import seed_of_choice
from server.loaded_model import loading
from server.state import ServerState
from server.telemetry.summary import Operation, RequestSummary, note_generation
from server.tool_calls.output_parser import OutputParser

if TYPE_CHECKING:
    from server.images.reader import HeldPixels

MAX_CHOICES = 16  # of one request in its record


class Sink(Protocol):
    """Where the chunks of one choice go, in order."""

    def put(self, chunk: Chunk) -> bool:
        """Take a chunk at once.  False: `room` must be awaited before the next one."""
        ...

    async def room(self) -> None: ...


def require_ready(state: ServerState) -> Ready:
    """The engine's Ready message.  Raises Unavailable while the engine loads or is down."""
    client = state.client
    if client.ready is not None and state.model.tokenizer is not None:
        return client.ready
    if client.down is not None:
        raise Unavailable(
            "the engine is down ({}) and being restarted: try again soon",
            client.down,
            code="engine_down",
            retry_after_s=5,
        )
    raise loading(client)


class Generation:
    """All completions of one HTTP request."""

    def __init__(
        self,
        state: ServerState,
        route: str,
        body: SamplingBody,
        prompts: list[list[int]],
        params: SamplingParams,
        salt: bytes,
        slots: AdmissionSlots,
        *,
        copies: int | None = None,
        parsers: Sequence[OutputParser] = (),
        operation: Operation = "chat",
        images: HeldPixels | None = None,
        generation_prompt_len: int = 0,
    ) -> None:
        """Submits every prompt `copies` times, by default `n`.

        salt       see server.http.request_context.prefix_salt
        slots      one for each completion
        parsers    one for each completion; none: all of their text is content
        operation  what telemetry says that it does
        images     those of the prompt, closed with this
        generation_prompt_len  see EngineRequest
        """
        self.name = uuid.uuid4().hex  # what the answer's id ends with
        self._state = state
        self._prompts = prompts
        self._salt = salt
        self._summary_args = operation, body.model, params
        self._images = images
        self._generation_prompt_len = generation_prompt_len
        self._closed = False
        self._n = copies or body.n or 1
        self.choices: list[Choice] = []
        together = nullcontext() if images is None else state.client.sent_together()
        try:
            with together:  # the pixels of images go to an engine once
                for prompt in prompts:
                    for copy in range(self._n):
                        parser = parsers[copy] if parsers else None
                        choice = self._submit(body, prompt, params, slots, copy, parser)
                        self.choices.append(choice)
        except Exception:
            self._abort("error")
            if images is not None:
                images.close()
            raise
        facts: dict[str, object] = {
            "route": route,
            "model": body.model,
            "stream": bool(body.stream),
        }
        self._record = state.requests.begin(self.name, facts, self._explain, self.choices)
        note_generation(self)

    def _submit(
        self,
        body: SamplingBody,
        prompt: list[int],
        params: SamplingParams,
        slots: AdmissionSlots,
        copy: int,
        parser: OutputParser | None,
    ) -> Choice:
        state = self._state
        if copy and params.seed is not None:
            params = msgspec.structs.replace(params, seed=seed_of_choice(params.seed, copy))
        detokenizer = state.tokenizer.detokenizer(
            skip_special=body.skip_special_tokens is not False,
            prompt=prompt,
            kept=None if parser is None else state.formats.kept_tokens,
        )
        text = AnswerText(
            detokenizer,
            body.stop_strings(),
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=params.min_tokens,
            scored=params.logprobs is not None or bool(body.return_token_ids),
            placed=parser is not None and parser.may_reason_later,
        )
        slots.give_back()
        priority = state.priority(body.priority)
        images = () if self._images is None else self._images.images
        mailbox = state.client.submit(
            prompt,
            params,
            priority=priority,
            salt=self._salt,
            images=images,
            generation_prompt_len=self._generation_prompt_len,
        )
        return Choice(len(self.choices), mailbox, text, parser, state.client, state.metrics)

    async def collect(self) -> list[GeneratedAnswer]:
        """Every choice, when all have ended.  Raises as `stream` does."""
        answers = [GeneratedAnswer(choice) for choice in self.choices]
        await self.stream(answers)
        return answers

    async def stream(self, sinks: Sequence[Sink]) -> None:
        """Put every chunk into the sink of its choice as it arrives; the last one has `finish`.

        Raises RequestError if the engine reports one.  The caller must call `close` afterwards.
        """
        runs = [_follow(*pair) for pair in zip(self.choices, sinks, strict=True)]
        try:
            if len(runs) == 1:
                await runs[0]
            else:
                await gather_or_cancel(runs)
        except Exception:
            self._abort("error")
            raise

    def close(self) -> None:
        """Abort what has not ended, so that the engine stops working on this request."""
        if not self._closed:
            self._closed = True
            self._abort("disconnect")
            if self._images is not None:
                self._images.close()
            self._state.metrics.generation_finished(
                max(choice.stats.generated for choice in self.choices)
            )
        self._record.end()

    def _abort(self, by: str) -> None:
        for choice in self.choices:
            choice.abort(by)

    def _explain(self) -> dict[str, object]:
        """The fields of the request's record that change while it runs."""
        choices = self.choices
        finishes = {choice.finish for choice in choices}
        if None in finishes:
            state = "running" if any(choice.stats.started for choice in choices) else "queued"
        elif "error" in finishes:
            state = "failed"
        else:
            state = "aborted" if "abort" in finishes else "finished"
        entries = [
            {"index": choice.index, "finish_reason": choice.finish}
            | choice.stats.timings()
            | {"events": choice.stats.events_json()}
            for choice in choices[:MAX_CHOICES]
        ]
        return {
            "state": state,
            "num_choices": len(choices),
            "choices": entries,
            "usage": self.usage(),
        }

    def summary(self) -> RequestSummary:
        """For the request's line in the log and for its trace."""
        operation, model, params = self._summary_args
        choices = self.choices
        return RequestSummary(
            operation,
            model,
            sum(map(len, self._prompts)),
            self._cached(),
            sum(choice.stats.generated for choice in choices),
            params,
            tuple(choice.finish for choice in choices),
            tuple(choice.stats.phases() for choice in choices),
        )

    def _cached(self) -> int:
        """Prompt tokens found in the prefix cache, once for each prompt."""
        return sum(choice.stats.cached for choice in self.choices[:: self._n])

    def usage(self, generated: int | None = None) -> dict[str, object]:
        """OpenAI's usage object: prompt tokens once per prompt, generated tokens of all choices."""
        prompt = sum(map(len, self._prompts))
        if generated is None:
            generated = sum(choice.stats.generated for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


async def _follow(choice: Choice, sink: Sink) -> None:
    """Called for each output: no task has to wake up for a token while the sink has room."""

    def take(output: RequestOutput) -> bool:
        chunk = choice.feed(output)
        return sink.put(chunk) and chunk.finish is None

    while choice.finish is None:
        await choice.mailbox.drain(take)
        await sink.room()


async def gather_or_cancel(runs: Sequence[Awaitable[None]]) -> None:
    """Await all; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
