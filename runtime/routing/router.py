"""Router: which engine gets a request, by the work of each and the prefixes that it has cached.

The objective is the time at which an engine has done all that was given to it, this request
included: the engine with the earliest such time gets the request.  An engine with a prefix of the
prompt has less to compute for it, and keeps the request until its other work takes longer than the
prefix would.  All terms are seconds, by what the engines have learned of their own steps:

    seconds of the prompt tokens left to compute, and of their query-key pairs
    + seconds of the image encoder for the images that are not encoded
    + the tokens that an answer has on average x the seconds that each of its rows adds to a step

where a row also takes its share of what a step of any size costs: one of as many rows as fit.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from statistics import fmean

from runtime.messages import EngineLoad, EngineRequest, Ready, StepSeconds, Work
from runtime.scheduler.images.image_sums import EncoderCosts, ImageSums
from runtime.scheduler.kv_cache.page_pool import (
    DIGEST_BYTES,
    TOKEN_BYTES,
    PageHash,
    chain_root,
    images_between,
    page_hash,
)

# Until the engines have timed their steps, each token counts the same.
UNKNOWN = StepSeconds(step=0.0, row=1.0, prompt_token=1.0, kv_token=0.0, pair=0.0)


class EngineRecord:
    """What is known of one engine."""

    def __init__(self) -> None:
        self.ready: Ready | None = None
        self.pages: set[PageHash] = set()  # that a prefix may hit
        self.load = EngineLoad()  # the last one that it reported
        # Requests that it was sent, but had not counted by then.
        self.unreported: deque[Work] = deque()
        self.num_sent = 0  # requests, since it is ready
        self.chosen_at = 0  # the number of the last choice that was this engine

    def start(self, ready: Ready | None) -> None:
        """It has started, or ended: what it had cached is lost."""
        self.ready = ready
        self.pages.clear()
        self.load = EngineLoad()
        self.unreported.clear()
        self.num_sent = 0

    def send(self, work: Work) -> None:
        self.num_sent += 1
        self.unreported.append(work)

    def report(self, load: EngineLoad) -> None:
        self.load = load
        while len(self.unreported) > max(self.num_sent - load.received, 0):
            self.unreported.popleft()
        self.pages.difference_update(_digests(load.dropped))
        self.pages.update(_digests(load.stored))

    def work(self) -> Work:
        """Of all requests that it has."""
        work = self.load.work
        for more in self.unreported:
            work = add(work, more)
        return work


class Router:
    """Of one API process, which routes its own requests.  Engines tell it the work of all."""

    def __init__(self, num_engines: int) -> None:
        self.engines = [EngineRecord() for _ in range(num_engines)]
        self._choices = 0

    def choose(self, request: EngineRequest, among: Sequence[int]) -> int:
        """The engine for a request, of those that are ready; it counts as sent there."""
        if len(self.engines) == 1:  # which reports no load
            return among[0]
        self._choices += 1
        cached = self.cached_tokens(request, among)
        times, answer = self._times(among), self._answer_tokens(among)
        ready = self.engines[among[0]].ready
        encoder = ready.encoder_costs if ready is not None else ()
        works = {each: work_of(request, cached[each], encoder) for each in among}

        def cost(engine: int) -> tuple[float, int]:
            record = self.engines[engine]
            work = add(record.work(), works[engine])
            return self.seconds(engine, work, times, answer), record.chosen_at

        chosen = min(among, key=cost)
        self.engines[chosen].chosen_at = self._choices
        self.engines[chosen].send(works[chosen])
        return chosen

    def seconds(self, engine: int, work: Work, times: StepSeconds, answer: float) -> float:
        """The time that this work takes an engine; answer: tokens of one, on average."""
        ready = self.engines[engine].ready
        rows = ready.max_num_seqs if ready is not None else 1
        prompts = work.prompt_tokens * times.prompt_token + work.pairs * times.pair
        per_row = times.row + times.step / rows
        prompts += work.encoder_stages * times.encoder_stage
        prompts += work.encoder_operations * times.encoder_operation
        return prompts + answer * (work.rows * per_row + work.kv_tokens * times.kv_token)

    def cached_tokens(self, request: EngineRequest, among: Sequence[int]) -> dict[int, int]:
        """Of each engine, the tokens of the longest prefix of a prompt whose pages it has.

        It hashes no further than any engine's prefix goes.  An upper bound where a prefix needs
        more than pages: windows of attention, or snapshots of recurrent states.
        """
        found = dict.fromkeys(among, 0)
        ready = self.engines[among[0]].ready
        if ready is None:
            return found
        size, tokens = ready.page_size, request.tokens
        pages = (len(tokens) - 1) // size  # at least one token is computed
        content = array("i", tokens[: pages * size]).tobytes()
        parent, page_bytes = chain_root(request.salt), size * TOKEN_BYTES
        alive = [engine for engine in among if self.engines[engine].pages]
        for page in range(pages):
            if not alive:
                break
            holds = content[page * page_bytes : (page + 1) * page_bytes]
            holds += images_between(request.images, page * size, (page + 1) * size)
            parent = page_hash(parent, holds)
            alive = [engine for engine in alive if parent in self.engines[engine].pages]
            for engine in alive:
                found[engine] = (page + 1) * size
        return found

    def _times(self, among: Sequence[int]) -> StepSeconds:
        """The mean of what the engines have learned: all run the same model on equal devices."""
        known = [times for each in among if (times := self.engines[each].load.times) is not None]
        if not known:
            return UNKNOWN
        fields = StepSeconds.__struct_fields__
        # An engine that has done nothing of a kind yet, as encoding images, has learned 0 of it.
        learned = ([getattr(times, name) for times in known] for name in fields)
        return StepSeconds(
            *(fmean([each for each in values if each] or [0.0]) for values in learned)
        )

    def _answer_tokens(self, among: Sequence[int]) -> float:
        """Of an answer, on average; 1 before the first one has ended."""
        known = [tokens for each in among if (tokens := self.engines[each].load.answer_tokens)]
        return fmean(known) if known else 1.0


def work_of(request: EngineRequest, cached: int, encoder: EncoderCosts = ()) -> Work:
    """Of a request, `cached` tokens of whose prompt are cached.

    encoder: Ready.encoder_costs.  An image whose features an engine has still counts as well
    """
    tokens = len(request.tokens)
    answers = request.params.max_tokens > 0
    images = ImageSums()
    for image in request.images:
        if image.start + image.num_tokens > cached:
            images.add(image)
    stages, operations = images.work(encoder)
    return Work(
        prompt_tokens=tokens - cached,
        pairs=(tokens - cached) * (tokens + cached) / 2,
        rows=int(answers),
        kv_tokens=tokens * answers,
        encoder_stages=stages,
        encoder_operations=operations,
    )


def add(one: Work, other: Work) -> Work:
    return Work(
        one.prompt_tokens + other.prompt_tokens,
        one.pairs + other.pairs,
        one.rows + other.rows,
        one.kv_tokens + other.kv_tokens,
        one.encoder_stages + other.encoder_stages,
        one.encoder_operations + other.encoder_operations,
    )


def _digests(joined: bytes) -> list[PageHash]:
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
