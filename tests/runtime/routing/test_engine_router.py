"""The rule by which a request gets an engine: work, cached prefixes, and what is on its way."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from runtime.messages import (
    EngineLoad,
    EngineRequest,
    PromptImage,
    Ready,
    SamplingParams,
    StepSeconds,
    Work,
)
from runtime.routing.router import Router, work_of
from runtime.scheduler.kv_cache.page_pool import chain_root, extend_chain
from runtime.scheduler.sequence import Sequence
from tests.support.examples import examples

PAGE = 16
# 8 ms a step, 30 us a prompt token: some GPU's.
TIMES = StepSeconds(step=8e-3, row=2e-5, prompt_token=3e-5, kv_token=2e-8, pair=1e-9)


def ready(slots: int = 64) -> Ready:
    return Ready(
        epoch=1,
        model_type="made up",
        device="cpu",
        dtype="float32",
        attention="mha",
        vocab_size=1000,
        max_model_len=1 << 20,
        page_size=PAGE,
        num_pages=1 << 16,
        max_num_seqs=slots,
        max_batched_tokens=512,
        weight_bytes=0,
        kv_bytes=0,
        load_seconds=0.0,
    )


def router_of(engines: int) -> Router:
    router = Router(engines)
    for engine in router.engines:
        engine.start(ready())
    return router


def request(tokens: Iterable[int], *, max_tokens: int = 100, salt: bytes = b"") -> EngineRequest:
    return EngineRequest(1, 0, list(tokens), SamplingParams(max_tokens=max_tokens), salt=salt)


def hashes(tokens: Iterable[int], salt: bytes = b"") -> bytes:
    found: list[bytes] = []
    extend_chain(found, chain_root(salt), list(tokens), PAGE)
    return b"".join(found)


def load(prompt_tokens: float = 0.0, rows: int = 0, **fields: object) -> EngineLoad:
    work = Work(prompt_tokens=prompt_tokens, rows=rows)
    return EngineLoad(work, times=TIMES, answer_tokens=50.0, **fields)  # type: ignore[arg-type]


def test_equal_requests_to_idle_engines_take_turns():
    router = router_of(3)
    # No report comes between them: what was sent counts.
    assert sorted(router.choose(request(range(100)), [0, 1, 2]) for _ in range(3)) == [0, 1, 2]
    assert sorted(router.choose(request(range(100)), [0, 1, 2]) for _ in range(3)) == [0, 1, 2]


def test_a_prompt_goes_to_the_engine_with_its_beginning():
    for engine in range(3):
        router = router_of(3)
        router.engines[engine].report(load(stored=hashes(range(512))))
        asked = request([*range(512), 7, 8, 9])
        assert router.cached_tokens(asked, [0, 1, 2])[engine] == 512
        assert [router.choose(asked, [0, 1, 2])] == [engine]


def test_the_longest_of_several_beginnings_decides_among_equals():
    router = router_of(2)
    router.engines[0].report(load(stored=hashes(range(320))))
    router.engines[1].report(load(stored=hashes(range(640))))
    assert router.choose(request(range(1000)), [0, 1]) == 1


def test_an_engine_with_the_beginning_is_left_once_its_work_takes_longer_than_computing_it():
    asked = request(range(1000, 1000 + 1024))
    for waiting, expected in ((500, 0), (1500, 1)):
        router = router_of(2)
        router.engines[0].report(load(waiting, stored=hashes(range(1000, 2008))))
        router.engines[1].report(load())
        assert router.choose(asked, [0, 1]) == expected


def test_answers_count_by_their_length_as_the_engines_know_it():
    for answer_tokens, expected in ((1.0, 0), (4000.0, 1)):
        router = router_of(2)
        # Ten answers in the one, a prompt of 1,000 tokens in the other.
        first = EngineLoad(Work(rows=10), times=TIMES, answer_tokens=answer_tokens)
        second = EngineLoad(Work(prompt_tokens=1000), times=TIMES, answer_tokens=answer_tokens)
        router.engines[0].report(first)
        router.engines[1].report(second)
        assert router.choose(request([1, 2, 3]), [0, 1]) == expected


def with_image(tokens: int, digest: bytes = b"1") -> EngineRequest:
    """A prompt of an image of so many tokens and ten others."""
    image = PromptImage(0, tokens, 32 * tokens, 32, b"", digest)
    return EngineRequest(1, 0, [5] * (tokens + 10), SamplingParams(max_tokens=9), images=(image,))


def test_an_image_that_waits_for_the_encoder_counts_as_long_as_it_takes_there():
    """A text of twice as many tokens as an image has takes less time than the image and its tokens:
    the next request goes where the text is."""
    times = structs.replace(TIMES, encoder_stage=1e-4, encoder_operation=2e-5)
    costs = ((1.5, 1e-5),) * 24  # of a token 36 * 10^9 operations in all, 0.7 ms
    router = router_of(2)
    for engine in router.engines:
        engine.start(structs.replace(ready(), encoder_costs=costs))
        engine.report(EngineLoad(times=times, answer_tokens=50.0))
    assert router.choose(with_image(100), [0, 1]) == 0
    assert router.choose(request(range(210)), [0, 1]) == 1
    assert router.choose(request(range(500, 600)), [0, 1]) == 1
    # The report that counts the image says the same; once it is encoded, the choice is another.
    stages, operations = 24, 24 * (150 + 0.1)
    work = Work(prompt_tokens=110, rows=1, encoder_stages=stages, encoder_operations=operations)
    router.engines[0].report(EngineLoad(work, 1, times, 50.0))
    assert router.engines[0].work() == work
    assert router.choose(request(range(700, 800)), [0, 1]) == 1
    encoded = structs.replace(work, encoder_stages=0, encoder_operations=0.0)
    router.engines[0].report(EngineLoad(encoded, 1, times, 50.0))
    assert router.choose(request(range(900, 1000)), [0, 1]) == 0


def test_an_image_within_a_cached_prefix_is_not_encoded():
    asked, costs = with_image(100), ((2.0, 0.01),) * 3
    work = work_of(asked, 0, costs)
    assert (work.encoder_stages, work.encoder_operations) == (3, 3 * (200 + 100))
    assert work_of(asked, 96, costs).encoder_stages == 3
    assert work_of(asked, 100, costs).encoder_stages == 0


def test_what_a_report_does_not_count_yet_is_added_to_it():
    router = router_of(2)
    assert router.choose(request(range(900)), [0, 1]) == 0
    assert router.choose(request(range(500)), [0, 1]) == 1
    router.engines[0].report(load(received=0))
    assert router.engines[0].work().prompt_tokens == 900
    router.engines[0].report(load(prompt_tokens=850, received=1))
    assert router.engines[0].work().prompt_tokens == 850
    assert router.engines[1].work().prompt_tokens == 500


def test_evicted_pages_are_no_beginning_any_more():
    router = router_of(2)
    stored = hashes(range(64))
    router.engines[1].report(load(stored=stored))
    router.engines[1].report(load(dropped=stored[16:32]))  # the second of four pages
    assert router.cached_tokens(request(range(100)), [0, 1]) == {0: 0, 1: PAGE}
    router.engines[1].start(None)
    assert router.engines[1].pages == set()


def test_one_token_of_a_prompt_is_always_computed():
    router = router_of(2)
    router.engines[0].report(load(stored=hashes(range(64))))
    assert router.cached_tokens(request(range(64)), [0, 1])[0] == 48


def test_prompts_share_a_beginning_only_with_the_same_salt():
    router = router_of(2)
    router.engines[0].report(load(stored=hashes(range(64), b"one")))
    assert router.cached_tokens(request(range(80), salt=b"one"), [0, 1])[0] == 64
    assert router.cached_tokens(request(range(80), salt=b"other"), [0, 1])[0] == 0


def test_images_are_part_of_a_beginning_as_the_engine_hashes_them():
    def asked(digest: bytes) -> EngineRequest:
        image = PromptImage(40, 8, 1, 1, b"rgb", digest)
        tokens = list(range(80))
        return EngineRequest(1, 0, tokens, SamplingParams(1), images=(image,))

    router = router_of(2)
    sequence = Sequence(asked(b"cat"), seed=0, arrival_index=0, max_model_len=1000)
    router.engines[0].report(load(stored=b"".join(sequence.hash_pages(PAGE))))
    assert router.cached_tokens(asked(b"cat"), [0, 1])[0] == 64
    assert router.cached_tokens(asked(b"dog"), [0, 1])[0] == 32, "up to the image's page"


def test_an_only_engine_is_chosen_without_hashing_anything():
    router = router_of(1)
    assert router.choose(request([]), [0]) == 0
    assert not router.engines[0].unreported, "no report would ever take it away"


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Engines, and requests: which of four prompts, its length, the tokens after it."""
    one = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 200))
    return draw(st.integers(2, 4)), draw(st.lists(one, min_size=1, max_size=60))


@examples(200)
@given(streams())
def test_work_stays_within_one_request_of_even(stream: tuple[int, list[tuple[int, int, int]]]):
    """Nothing ends meanwhile.  Whatever is cached, no engine has more work than another one would
    have with the largest request on top: so the last to be done is done by that much later."""
    count, requests = stream
    router = router_of(count)
    given: list[list[EngineRequest]] = [[] for _ in range(count)]
    largest = 0.0
    for prompt, pages, rest in requests:
        tokens = [*range(1000 * prompt, 1000 * prompt + pages * PAGE), *range(9000, 9000 + rest)]
        asked = request(tokens)
        engine = router.choose(asked, range(count))
        given[engine].append(asked)
        # It has computed the prompt by the next request, and reports so without its other work.
        record = router.engines[engine]
        record.report(
            EngineLoad(record.load.work, times=TIMES, answer_tokens=50.0, stored=hashes(tokens))
        )
        largest = max(largest, router.seconds(engine, work_of(asked, 0), TIMES, 50.0))
        totals = [
            router.seconds(each, router.engines[each].work(), TIMES, 50.0) for each in range(count)
        ]
        assert max(totals) - min(totals) <= largest * (1 + 1e-9)
    assert sum(map(len, given)) == len(requests)


@examples(200)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 50)), min_size=2, max_size=5),
    st.integers(0, 60),
    st.integers(1, 1000),
)
def test_no_engine_is_chosen_that_another_one_is_better_than_in_everything(
    loads: list[tuple[int, int]], cached_pages: int, rest: int
):
    router = router_of(len(loads))
    tokens = [*range(cached_pages * PAGE), *range(5000, 5000 + rest)]
    for engine, (prompt_tokens, rows) in zip(router.engines, loads, strict=True):
        # Those with less to do have more of the prompt.
        pages = hashes(tokens[: cached_pages * PAGE]) if prompt_tokens % 2 == 0 else b""
        engine.report(load(prompt_tokens, rows, stored=pages))
    asked = request(tokens)
    cached = router.cached_tokens(asked, range(len(loads)))
    chosen = router.choose(asked, range(len(loads)))
    for other, (prompt_tokens, rows) in enumerate(loads):
        mine = loads[chosen]
        better = prompt_tokens < mine[0] and rows <= mine[1] and cached[other] >= cached[chosen]
        assert not better
