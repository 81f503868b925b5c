"""Runner, slots, inputs and sampler under the real engine, with a model that forgives nothing.

A KV cell of this model holds its token, and the logits hash every cell that is read through the
page table: one stale, lost or aliased cell changes the answer.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from model_zoo.inputs import ModelInput
from runtime.config import ResolvedConfig
from runtime.engine.loop import Engine
from runtime.executor.torch_executor import TorchExecutor
from runtime.messages import EngineRequest, RequestOutput, SamplingParams
from runtime.scheduler.batch import LAST, NewRow, make_batch
from tests.support.examples import examples

CPU = torch.device("cpu")
VOCAB = 61
PAGE = 16


def logits_after(cells: list[int]) -> Tensor:
    digest = hashlib.blake2b(bytes(cells), digest_size=8).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    return torch.randn(VOCAB, generator=noise) * 3


class StrictModel:
    """Hidden state = logits.  `poison`: a token whose sight turns a row's logits into NaN."""

    def __init__(self, poison: int = -1) -> None:
        self.poison = poison
        self.logit_calls: list[int] = []

    def __call__(self, inp: ModelInput) -> Tensor:
        pool, slots = inp.kv.k[0, :, 0, :, 0], inp.meta.slot_mappings[0]
        pool[slots // PAGE, slots % PAGE] = inp.tokens.to(pool.dtype)
        cells = pool.flatten()
        hidden: list[Tensor] = []
        for row, (q_len, kv_len) in enumerate(zip(inp.meta.q_lens, inp.meta.kv_lens, strict=True)):
            pages = inp.meta.page_tables[0][row].tolist()
            held = cells.tolist()
            seen = [int(held[pages[p // PAGE] * PAGE + p % PAGE]) for p in range(kv_len)]
            for end in range(kv_len - q_len + 1, kv_len + 1):
                bad = self.poison in seen[:end]
                hidden.append(torch.full((VOCAB,), torch.nan) if bad else logits_after(seen[:end]))
        states = torch.stack(hidden).to(cells.device)
        return states if inp.ends is None else states[inp.ends]

    def shortened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def logits(self, hidden: Tensor) -> Tensor:
        self.logit_calls.append(len(hidden))
        return hidden.clone()


@dataclass(frozen=True)
class Where:
    """A device, and whether a step is scheduled before the results of the last are read."""

    device: torch.device
    overlap: bool


@pytest.fixture(
    scope="module",
    params=[
        Where(CPU, overlap=False),
        Where(CPU, overlap=True),
        pytest.param(Where(torch.device("cuda"), overlap=True), marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cpu-overlapped", "cuda"],
)
def where(request: pytest.FixtureRequest) -> Where:
    return request.param


def make_engine(
    where: Where, model: StrictModel, *, pages: int = 64, slots: int = 4, budget: int = 32
) -> Engine:
    resolved = ResolvedConfig(
        model="",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        load_format="auto",
        max_model_len=min(pages * PAGE, 256),
        max_num_seqs=slots,
        max_batched_tokens=budget,
        page_size=PAGE,
        num_pages=pages,
        prefix_cache=True,
        threads=1,
        seed=0,
    )
    kv = KVPool.allocate(
        layers=1, pages=pages, kv_heads=1, page_size=PAGE, head_dim=1,
        dtype=torch.float32, device=where.device,
    )  # fmt: skip
    runner = TorchExecutor(
        model,
        resolved=resolved,
        vocab_size=VOCAB,
        kv=kv,
        backend=ReferenceBackend(),
        device=where.device,
    )
    runner.overlap = where.overlap
    return Engine(resolved, VOCAB, runner)


def run(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[RequestOutput]]:
    got: dict[int, list[RequestOutput]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(5000):
        for output in engine.step():
            got[output.id].append(output)
        if engine.idle:
            assert engine.requests.pool.num_used == 0
            return got
    raise AssertionError("no progress")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    assert [output.finish is not None for output in outputs].count(True) == 1
    return [token for output in outputs for token in output.tokens]


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@examples(120)
@given(data=st.data())
def test_any_mix_of_requests_gets_the_tokens_of_plain_decoding(
    where: Where, data: st.DataObject
) -> None:
    """Chunks, preemption and prefix hits: few slots, few pages, small steps."""
    common = data.draw(prompts)
    requests = [
        EngineRequest(
            number,
            0,
            (common if data.draw(st.booleans()) else []) + data.draw(prompts),
            SamplingParams(max_tokens=data.draw(st.integers(1, 20)), temperature=0),
        )
        for number in range(data.draw(st.integers(1, 6)))
    ]
    engine = make_engine(
        where,
        StrictModel(),
        pages=data.draw(st.sampled_from([7, 9, 40])),
        slots=data.draw(st.sampled_from([2, 4])),
        budget=data.draw(st.sampled_from([5, 32])),
    )
    for id, outputs in run(engine, requests).items():
        request = requests[id]
        assert tokens_of(outputs) == greedy(request.tokens, request.params.max_tokens)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_seeded_samples_do_not_depend_on_the_rest_of_the_batch(
    where: Where, data: st.DataObject
) -> None:
    params = SamplingParams(
        max_tokens=12, seed=data.draw(st.integers(0, 2**40)), temperature=1.3, top_p=0.9,
        frequency_penalty=0.5, repetition_penalty=1.2,
    )  # fmt: skip
    prompt = data.draw(prompts)
    alone = tokens_of(
        run(make_engine(where, StrictModel()), [EngineRequest(0, 0, prompt, params)])[0]
    )
    others = [
        EngineRequest(number, 0, data.draw(prompts), SamplingParams(max_tokens=15, temperature=0.7))
        for number in range(1, 5)
    ]
    crowd = make_engine(where, StrictModel(), pages=9, slots=3, budget=7)
    requests = [*others, EngineRequest(0, 0, prompt, params)]
    assert tokens_of(run(crowd, requests)[0]) == alone


def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut(where: Where) -> None:
    prompt = [(7 * i) % VOCAB for i in range(37)]
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=1, prompt_logprobs=2)
    for budget in (5, 36, 64):
        engine = make_engine(where, StrictModel(), budget=budget)
        for id in (0, 1):  # the second finds the first one's pages remembered
            outputs = run(engine, [EngineRequest(id, 0, prompt, params)])[id]
            scores = outputs[0].prompt_logprobs
            assert scores is not None and scores[0] is None and len(scores) == len(prompt)
            for position, scored in enumerate(scores[1:], 1):
                expected = logits_after(prompt[:position]).log_softmax(-1)
                assert scored is not None
                assert scored.logprob == pytest.approx(float(expected[prompt[position]]), abs=1e-5)
                assert [token for token, _ in scored.top] == expected.topk(2).indices.tolist()
            first = outputs[0].logprobs
            assert first is not None and first[0].rank == 1 and len(first[0].top) == 1
            assert outputs[1].prompt_logprobs is None


def test_prompt_of_one_token_has_one_prompt_logprob_and_that_is_none(where: Where) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = run(make_engine(where, StrictModel()), [EngineRequest(0, 0, [5], params)])[0]
    assert outputs[0].prompt_logprobs == [None]


def test_logits_that_are_not_finite_end_only_their_own_request(where: Where) -> None:
    engine = make_engine(where, StrictModel(poison=60))
    params = SamplingParams(max_tokens=3, temperature=0)
    got = run(engine, [EngineRequest(0, 0, [1, 60], params), EngineRequest(1, 0, [1, 2], params)])
    assert [output.finish for output in got[0]] == ["error"]
    assert got[0][0].error == "the model's output is not a number for this request"
    assert tokens_of(got[1]) == greedy([1, 2], 3)


def test_a_row_that_may_take_no_token_is_the_requests_own_mistake_and_its_pages_stay(
    where: Where,
) -> None:
    engine = make_engine(where, StrictModel())
    prompt = [token % 50 for token in range(2 * PAGE + 3)]
    plain = SamplingParams(max_tokens=3, temperature=0)
    # Stop ids are masked before min_tokens: nothing is left.
    stuck = SamplingParams(
        max_tokens=9, temperature=0, allowed_ids=(7,), stop_ids=(7,), min_tokens=2, logprobs=1
    )
    got = run(engine, [EngineRequest(0, 0, prompt, plain), EngineRequest(1, 0, [1, 2], plain)])
    got |= run(engine, [EngineRequest(2, 0, prompt, stuck), EngineRequest(3, 0, [1, 2], plain)])
    [end] = got[2]
    assert end.finish == "error" and end.is_request_error
    assert end.error is not None and "no token is left to choose from" in end.error
    assert tokens_of(got[3]) == tokens_of(got[1])
    [first, *_] = run(engine, [EngineRequest(4, 0, prompt, plain)])[4]
    assert first.cached == 2 * PAGE, "the pages of the prompt are as good as ever"


def test_a_chunk_that_is_not_finite_ends_its_request_at_once_and_its_pages_are_not_cached(
    where: Where,
) -> None:
    engine = make_engine(where, StrictModel(poison=60), budget=16)
    params = SamplingParams(max_tokens=2, temperature=0)
    prompt = [1] * 20 + [60] + [2] * 180
    engine.add(EngineRequest(0, 0, prompt, params))
    outputs: list[RequestOutput] = []
    for _ in range(4):
        outputs += engine.step()
    assert [output.finish for output in outputs] == ["error"]
    assert outputs[0].error == "the model's output is not a number for this request"
    pool = engine.requests.pool
    assert pool.num_used == 0 and not pool.cached_pages


def test_chunks_that_do_not_sample_make_no_logits(where: Where) -> None:
    model = StrictModel()
    engine = make_engine(where, model, budget=8)
    run(engine, [EngineRequest(0, 0, [1] * 30, SamplingParams(max_tokens=2, temperature=0))])
    assert set(model.logit_calls) == {1}


def test_rows_that_do_not_sample_are_marked(where: Where) -> None:
    executor = make_engine(where, StrictModel())._executor
    params = SamplingParams(max_tokens=2, temperature=0)
    new_rows = [NewRow(slot, params, 0, 4, []) for slot in (0, 1)]
    batch = make_batch(
        [0, 1], [0, 0], [2, 2], [1, 2, 3, 4], [1, 1], [0, 1], [False, True], 0, new_rows
    )
    executor.forward(batch)
    sampled = executor.sample(batch).wait()
    assert sampled.tokens.tolist() == [[LAST], [int(logits_after([3, 4]).argmax())]]
    assert sampled.logprobs is None and sampled.prompt_logprobs is None and not sampled.errors


def test_only_the_row_whose_chunk_is_not_finite_is_said_to_be_unusable(where: Where) -> None:
    executor = make_engine(where, StrictModel(poison=60))._executor
    params = SamplingParams(max_tokens=2, temperature=0)
    new_rows = [NewRow(slot, params, 0, 5, []) for slot in (0, 1, 2)]
    tokens = [1, 2, 60, 4, 5, 6]
    samples = [False, False, True]
    batch = make_batch(
        [0, 1, 2], [0] * 3, [2] * 3, tokens, [1] * 3, [0, 1, 2], samples, 0, new_rows
    )
    executor.forward(batch)
    assert set(executor.sample(batch).wait().errors) == {1}


def test_a_row_whose_logits_are_not_finite_has_no_log_probabilities(where: Where) -> None:
    executor = make_engine(where, StrictModel(poison=60))._executor
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=1)
    new_rows = [NewRow(slot, params, 0, 2, []) for slot in (0, 1)]
    batch = make_batch(
        [0, 1], [0, 0], [2, 2], [1, 60, 3, 4], [1, 1], [0, 1], [True, True], 0, new_rows
    )
    executor.forward(batch)
    output = executor.sample(batch).wait()
    assert set(output.errors) == {0} and output.logprobs is not None
    spoiled, [score] = output.logprobs[0], output.logprobs[1] or []
    assert spoiled is None
    assert score.logprob == pytest.approx(logits_after([3, 4]).log_softmax(-1).max().item())
