"""The completions of one HTTP request: submission, outputs, usage, abort."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

import msgspec

from runtime.messages import Ready, RequestOutput, SamplingParams
from server.apis.openai.sampling_schema import SamplingBody
from server.errors import EngineFailed, RequestError, Unavailable
from server.generation.admission import AdmissionSlots
from server.generation.choice import Choice, TextChunk
from server.generation.request_log import state_of_choices
from server.generation.sampling_params import seed_of_choice
from server.prompt.tokenizer import KeptTokens
from server.state import ServerState

Render = Callable[[Choice, TextChunk], bytes]  # the frames of a chunk; empty if it has none
Write = Callable[[bytes], Awaitable[None]]


def require_ready(state: ServerState) -> Ready:
    """The engine's Ready message.  Raises Unavailable while the engine loads or is down."""
    client = state.client
    if client.ready is not None:
        return client.ready
    if client.down is not None:
        raise Unavailable(
            f"the engine is down ({client.down}) and being restarted: try again soon",
            code="engine_down",
            retry_after_s=5,
        )
    progress = client.progress
    doing = "starting"
    if progress is not None:
        share = f" {progress.done}/{progress.total}" if progress.total else ""
        doing = f"{progress.phase}{share}"
    raise Unavailable(
        f"the model is not loaded yet ({doing}): try again soon", code="loading", retry_after_s=2
    )


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
        kept_tokens: KeptTokens | None = None,
    ) -> None:
        """Submits every prompt `copies` times, by default `n`.

        salt    see server.http.request_context.prefix_salt
        slots  one for each completion
        kept_tokens  special tokens that stay in the text
        """
        self.name = uuid.uuid4().hex  # what the answer's id ends with
        self._state = state
        self._prompts = prompts
        self._salt = salt
        self._kept_tokens = kept_tokens
        n = copies or body.n or 1
        self.choices: list[Choice] = []
        try:
            for prompt in prompts:
                for copy in range(n):
                    self.choices.append(self._submit(body, prompt, params, slots, copy))
        except Exception:
            self._abort("error")
            raise
        self._n = n
        facts: dict[str, object] = {
            "route": route,
            "model": body.model,
            "stream": bool(body.stream),
        }
        self._record = state.requests.begin(self.name, facts, self._explain)

    def _submit(
        self,
        body: SamplingBody,
        prompt: list[int],
        params: SamplingParams,
        slots: AdmissionSlots,
        copy: int,
    ) -> Choice:
        if copy and params.seed is not None:
            params = msgspec.structs.replace(params, seed=seed_of_choice(params.seed, copy))
        detokenizer = self._state.tokenizer.detokenizer(
            skip_special=body.skip_special_tokens is not False,
            prompt=prompt,
            kept=self._kept_tokens,
        )
        slots.give_back()
        mailbox = self._state.client.submit(
            prompt, params, priority=body.priority or 0, salt=self._salt
        )
        return Choice(
            len(self.choices),
            mailbox,
            detokenizer,
            body.stop_strings(),
            include_stop=bool(body.include_stop_str_in_output),
        )

    async def collect(self) -> list[list[TextChunk]]:
        """All chunks of each choice, when all have ended.  Raises as `stream` does."""
        chunks: list[list[TextChunk]] = [[] for _ in self.choices]

        def keep(choice: Choice, chunk: TextChunk) -> bytes:
            chunks[choice.index].append(chunk)
            return b""

        async def write(data: bytes) -> None:
            raise AssertionError("nothing was rendered")

        await self.stream(keep, write)
        return chunks

    async def stream(
        self, render: Render, write: Write, write_now: Callable[[bytes], bool] | None = None
    ) -> None:
        """Write every chunk of every choice as it arrives, in order within a choice.

        write_now: writes without waiting and returns True, or returns False if it would have to
        Raises EngineFailed if the engine reports one.  The caller must call `close` afterwards.
        """
        try:
            if len(self.choices) == 1:
                await self._follow(self.choices[0], render, write, write_now)
            else:
                await gather_or_cancel(
                    [self._follow(c, render, write, write_now) for c in self.choices]
                )
        except Exception:
            self._abort("error")
            raise

    def close(self) -> None:
        """Abort what has not ended, so that the engine stops working on this request."""
        self._abort("disconnect")
        self._record.end()

    def _explain(self) -> dict[str, object]:
        return state_of_choices(self.choices) | {"usage": self.usage()}

    async def _follow(
        self,
        choice: Choice,
        render: Render,
        write: Write,
        write_now: Callable[[bytes], bool] | None,
    ) -> None:
        unsent = b""

        def take(output: RequestOutput) -> bool:
            """Write an output's frames.  False: they must be awaited, or the choice has ended."""
            nonlocal unsent
            data = self._render(choice, output, render)
            if data and (write_now is None or not write_now(data)):
                unsent = data
                return False
            return choice.finish is None

        while choice.finish is None:
            await choice.mailbox.drain(take)
            if unsent:
                data, unsent = unsent, b""
                await write(data)

    def _render(self, choice: Choice, output: RequestOutput, render: Render) -> bytes:
        """The frames of an output.  Raises RequestError, EngineFailed for errors of the engine."""
        if output.tokens:
            now = time.monotonic()
            if choice.last_token:
                self._state.metrics.inter_token(now - choice.last_token)
            else:
                choice.first_token = now
            choice.last_token = now
        if output.finish == "error" or output.finish == "abort":
            choice.finish = output.finish
            self._count(choice)
            if output.is_request_error:
                grammar = choice.mailbox.request.params.grammar
                code = "invalid_grammar" if grammar else "invalid_value"
                raise RequestError(output.error or "", code=code)
            raise EngineFailed(f"the answer was cut off: {output.error or 'it was aborted'}")
        chunk = choice.feed(output)
        if chunk.finish is not None:
            if output.finish is None:  # a stop string: the engine does not see those
                self._state.client.abort(choice.mailbox.id)
            self._count(choice)
        return render(choice, chunk)

    def _count(self, choice: Choice) -> None:
        choice.ended = time.monotonic()
        self._state.metrics.request_finished(
            choice.finish,
            len(choice.prompt),
            choice.generated,
            arrived=choice.mailbox.arrived,
            started=choice.started,
            first_token=choice.first_token,
            ended=choice.ended,
        )

    def _abort(self, by: str) -> None:
        for choice in self.choices:
            if choice.finish is None:
                choice.finish = "abort"
                choice.ended = time.monotonic()
                self._state.client.abort(choice.mailbox.id)
                self._state.metrics.aborted(by)

    def usage(self, generated: int | None = None) -> dict[str, object]:
        """OpenAI's usage object: prompt tokens once per prompt, generated tokens of all choices."""
        prompt = sum(map(len, self._prompts))
        if generated is None:
            generated = sum(choice.generated for choice in self.choices)
        cached = sum(choice.cached for choice in self.choices[:: self._n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


async def gather_or_cancel(runs: list[Awaitable[None]]) -> None:
    """Await all; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
