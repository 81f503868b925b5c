"""The embeddings of one HTTP request's prompts: tokens, submission, results, usage."""

from __future__ import annotations

import math
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.ipc.client import Mailbox
from runtime.messages import PoolingParams, Ready, RequestOutput, SamplingParams
from server.errors import ContextTooLong, FieldPath, RequestError
from server.generation.admission import AdmissionSlots
from server.generation.choice import unanswered
from server.generation.generation import gather_or_cancel
from server.generation.off_loop import off_loop
from server.generation.sampling_params import Truncation, check_chars, check_token_ids
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState
from server.telemetry.summary import Phases, RequestSummary, note_generation

MAX_CONCURRENT = 256  # prompts of one request that the engine has at a time
MAX_TOKENS = 1 << 20  # of all prompts of one request


@dataclass(frozen=True)
class EmbeddingInput:
    """One text or list of token ids of a request, and how to truncate it."""

    content: str | list[int]
    path: FieldPath  # of its field
    cut: Truncation | None = None  # None: no truncation
    special: bool = True  # with the special tokens that the tokenizer adds to a text

    def tokens(self, tokenizer: ChatTokenizer) -> list[int]:
        cut = self.cut
        if not isinstance(self.content, str):
            return self.content if cut is None else cut.tokens(self.content)
        if cut is None:
            return tokenizer.encode(self.content, add_special_tokens=self.special)
        text = cut.text(self.content, tokenizer)
        [encoding] = tokenizer.tokenizer.encode_batch([text], add_special_tokens=False)
        around = tokenizer.tokenizer.num_special_tokens_to_add(False) if self.special else 0
        encoding.truncate(max(0, cut.max_tokens - around), direction=cut.side)
        # Truncated first: pooling of the last token needs the end token that is added here.
        return tokenizer.tokenizer.post_process(encoding, None, self.special).ids


def reserve_prompts(state: ServerState, num_prompts: int) -> AdmissionSlots:
    """A slot for each prompt that is in the engine at a time.  Raises RateLimited."""
    admission = state.admission
    return admission.reserve(min(num_prompts, MAX_CONCURRENT, admission.share))


async def tokenize_inputs(
    state: ServerState, ready: Ready, inputs: Sequence[EmbeddingInput]
) -> list[list[int]]:
    """The token ids of each input.  Raises RequestError, naming the first that is invalid."""
    tokenizer = state.tokenizer
    for one in inputs:
        if isinstance(one.content, str) and one.cut is None:
            check_chars(len(one.content), tokenizer, ready, one.path)

    def work() -> list[list[int]]:
        prompts: list[list[int]] = []
        total = 0
        for one in inputs:
            if not isinstance(one.content, str):
                check_token_ids(one.content, ready.vocab_size, one.path)
            tokens = one.tokens(tokenizer)
            _check_length(len(tokens), ready.max_model_len, one.path)
            total += len(tokens)
            if total > MAX_TOKENS:
                raise RequestError(
                    "the prompts up to {} have {} tokens, at most {} are taken in one request: "
                    "send fewer at a time",
                    (one.path, total, MAX_TOKENS),
                )
            prompts.append(tokens)
        return prompts

    return await off_loop(sum(len(one.content) for one in inputs), work)


def _check_length(length: int, limit: int, path: FieldPath) -> None:
    if not length:
        raise RequestError("{} has no tokens: send some text", path)
    if length > limit:
        raise ContextTooLong(
            length,
            limit,
            "{} has {} tokens: shorten it, or set {truncate_prompt_tokens}",
            (path, length),
            param=path,
        )


def decode_embedding(embedding: bytes) -> tuple[float, ...]:
    """The numbers of an embedding in little-endian float32."""
    return struct.unpack(f"<{len(embedding) // 4}f", embedding)


class PoolingJob:
    """Computes the embeddings of the prompts of one request, in their order."""

    def __init__(
        self,
        state: ServerState,
        route: str,
        model: str,
        prompts: list[list[int]],
        pooling: PoolingParams,
        slots: AdmissionSlots,
        *,
        salt: bytes,
        priority: int = 0,
    ) -> None:
        """Nothing is submitted yet.

        slots  from reserve_prompts; the caller closes them after `close`
        """
        self.name = uuid.uuid4().hex  # the end of the answer's id
        self._state = state
        self._prompts = prompts
        self._params = SamplingParams(max_tokens=0, pooling=pooling)
        self._salt = salt
        self._priority = state.priority(priority)
        self._slots = slots
        self._open: set[Mailbox] = set()
        self._found: list[bytes] = [b""] * len(prompts)
        self._cached = 0
        self._arrived = time.monotonic()
        self._started = math.inf  # the first step that any prompt was in
        self._num_done = 0
        self._failed = False
        facts: dict[str, object] = {"route": route, "model": model, "stream": False}
        self._record = state.requests.begin(self.name, facts, self._explain)
        self._model = model
        self._ended = 0.0  # until it is closed
        note_generation(self)

    async def collect(self) -> list[bytes]:
        """Little-endian float32, one entry a prompt.  The caller must call `close` afterwards.

        Raises RequestError if the engine reports an error, see `unanswered`.
        """
        indices = iter(range(len(self._prompts)))

        async def worker() -> None:
            for index in indices:  # shared: each worker takes the next prompt
                self._found[index] = await self._one(self._prompts[index])
            self._slots.give_back()

        try:
            await gather_or_cancel([worker() for _ in range(self._slots.held)])
        except Exception:
            self._failed = True
            self._abort("error")
            raise
        return self._found

    async def _one(self, prompt: list[int]) -> bytes:
        outputs: list[RequestOutput] = []

        def ended(output: RequestOutput) -> bool:
            outputs.append(output)
            self._slots.take()  # for the worker's next prompt, before another request takes it
            return False

        self._slots.give_back()
        mailbox = self._state.client.submit(
            prompt, self._params, priority=self._priority, salt=self._salt
        )
        self._open.add(mailbox)
        await mailbox.drain(ended)
        [output] = outputs
        self._open.discard(mailbox)
        self._cached += output.cached
        self._started = min(self._started, output.started)
        self._state.metrics.request_finished(
            output.finish,
            len(prompt),
            0,
            arrived=mailbox.arrived,
            started=output.started,
            first_token=0.0,  # there is none
            ended=time.monotonic(),
        )
        if output.finish != "stop":
            raise unanswered("no embedding was computed: {}", mailbox, output)
        self._num_done += 1
        return output.embedding

    def close(self) -> None:
        """Abort what has not ended, so that the engine stops working on this request."""
        self._abort("disconnect")
        self._record.end()
        self._ended = time.monotonic()

    def _abort(self, by: str) -> None:
        for mailbox in self._open:
            self._state.client.abort(mailbox.id)
            self._state.metrics.aborted(by)
            self._state.metrics.request_finished(
                "abort",
                len(mailbox.request.tokens),
                0,
                arrived=mailbox.arrived,
                started=0.0,  # unknown: the engine says it with the embedding
                first_token=0.0,
                ended=time.monotonic(),
            )
        self._open.clear()

    def _explain(self) -> dict[str, object]:
        """The fields of the request's record that change until it is closed."""
        if self._failed:
            state = "failed"
        elif self._num_done == len(self._prompts):
            state = "finished"
        else:
            state = "running" if self._open else "aborted"
        return {
            "state": state,
            "num_prompts": len(self._prompts),
            "num_done": self._num_done,
            "usage": self.usage(),
        }

    def summary(self) -> RequestSummary:
        """For the request's line in the log and for its trace."""
        finish = "stop" if self._num_done == len(self._prompts) else "abort"
        started = self._started if self._started < math.inf else 0.0
        return RequestSummary(
            "embeddings",
            self._model,
            self.num_tokens,
            self._cached,
            0,
            self._params,
            ("error" if self._failed else finish,),
            (Phases(self._arrived, started, ended=self._ended),),
        )

    @property
    def waited_seconds(self) -> float:
        """From arrival to the first step that any prompt was in; valid when all are done."""
        return max(0.0, self._started - self._arrived)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._prompts))

    def usage(self) -> dict[str, object]:
        prompt = self.num_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
