"""Warm-up: synthetic batches of every kind, run before the first request; and the largest ones."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.config import ResolvedConfig
from runtime.executor.protocols import DeviceExecutor
from runtime.messages import SamplingParams
from runtime.scheduler.batch import Batch, Masks, NewRow, make_batch

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLED_PARAMS = SamplingParams(max_tokens=1, temperature=0.5, top_p=0.9)
# Every feature that takes memory; the token history of the sequence is needed, too.
EVERYTHING = SamplingParams(
    max_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=1000,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    min_tokens=1,
    stop_ids=(0,),
    logprobs=20,
    banned=((0, 0),),
)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, prompt_logprobs=20)
SCORED_TOKENS = 256
WARM_UP_STATES = 2  # recurrent states, of rows whose answers do not matter
MAX_PROMPT = 2048  # tokens of a warm-up step: larger ones run the same code


def run(executor: DeviceExecutor, batch: Batch, masks: Masks | None = None) -> None:
    """Run a batch and wait for its outputs."""
    executor.forward(batch)
    executor.sample(batch, masks).wait()


def warm_up(executor: DeviceExecutor, resolved: ResolvedConfig) -> None:
    """Run a batch of every kind."""
    for batch in all_batch_kinds(resolved):
        run(executor, batch)


def all_batch_kinds(resolved: ResolvedConfig) -> Iterator[Batch]:
    """Prefill, decode and mixed batches, and every kind of sampling.

    On a GPU in powers of two: some kernels are compiled, and some GEMM kernels chosen, for ranges
    of sizes that are no wider.
    """
    on_gpu = resolved.device == "cuda"
    longest = min(resolved.max_batched_tokens, resolved.max_model_len - 1)
    max_prompt = min(MAX_PROMPT if on_gpu else 8, longest)
    for tokens in _powers(min(8, max_prompt), max_prompt):
        yield one_prompt(resolved, tokens, SAMPLED_PARAMS)
    max_rows = resolved.max_num_seqs if on_gpu else 1
    for rows in _powers(1, max_rows):
        yield decode_rows(resolved, rows, SAMPLED_PARAMS)
    for params in (GREEDY, EVERYTHING):
        yield decode_rows(resolved, 1, params)
    if resolved.max_num_seqs > 1 and longest > 1:
        yield mixed(resolved, min(7, longest - 1))


def prompt_of_some_hundred(resolved: ResolvedConfig) -> Batch:
    """256 tokens, if a step and a sequence can have as many."""
    longest = min(resolved.max_batched_tokens, resolved.max_model_len - 1)
    return one_prompt(resolved, min(256, longest), SAMPLED_PARAMS)


def largest(
    resolved: ResolvedConfig, tokens: int, vocab_size: int
) -> Iterator[tuple[Batch, Masks | None]]:
    """The batches of peak memory: `tokens` of the longest sequence, and all rows decoding."""
    tokens, rows = min(tokens, resolved.max_model_len - 1), resolved.max_num_seqs
    before = resolved.max_model_len - 1 - tokens
    # Prompt log-probabilities are computed in chunks: SCORED_TOKENS reach their peak.
    yield one_prompt(resolved, tokens, SCORED, before=before, prompt=before + SCORED_TOKENS), None
    every_token = b"\xff" * -(-vocab_size // 8)
    yield decode_rows(resolved, rows, EVERYTHING), Masks(list(range(rows)), every_token * rows)


def _powers(first: int, last: int) -> list[int]:
    """Sizes from first to last by doubling, and last."""
    sizes = [first]
    while sizes[-1] * 2 < last:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == last else [*sizes, last]


def one_prompt(
    resolved: ResolvedConfig, tokens: int, params: SamplingParams, before: int = 0, prompt: int = 0
) -> Batch:
    """`tokens` of one sequence after `before` others; all of its pages are page 0.

    prompt: length of the prompt; later tokens are output.  0: all are prompt
    """
    pages = -(-(before + tokens) // resolved.page_size)
    return make_batch(
        slots=[0],
        starts=[before],
        q_lens=[tokens],
        tokens=[0] * tokens,
        num_new_pages=[pages],
        new_pages=[0] * pages * resolved.num_groups,
        sample=[True],
        decode_rows=0,
        new_rows=[new_row(0, params, prompt or before + tokens)],
        state_slots=state_slots(resolved, 1),
    )


def decode_rows(
    resolved: ResolvedConfig, rows: int, params: SamplingParams, *, before: int = 0, pages: int = 1
) -> Batch:
    """Rows of one token each, after `before` others; theirs are the pool's first `pages`."""
    each = before // resolved.page_size + 1
    return make_batch(
        slots=list(range(rows)),
        starts=[before] * rows,
        q_lens=[1] * rows,
        tokens=[0] * rows,
        num_new_pages=[each] * rows,
        new_pages=[page % pages for page in range(rows * each * resolved.num_groups)],
        sample=[True] * rows,
        decode_rows=rows,
        new_rows=[new_row(slot, params, before + 1) for slot in range(rows)],
        state_slots=state_slots(resolved, rows),
    )


def mixed(resolved: ResolvedConfig, tokens: int) -> Batch:
    """A decode row and a prefill chunk."""
    pages = -(-tokens // resolved.page_size)
    return make_batch(
        slots=[0, 1],
        starts=[0, 0],
        q_lens=[1, tokens],
        tokens=[0] * (1 + tokens),
        num_new_pages=[1, pages],
        new_pages=[0] * (1 + pages) * resolved.num_groups,
        sample=[True, False],
        decode_rows=1,
        new_rows=[new_row(0, SAMPLED_PARAMS, 1), new_row(1, SAMPLED_PARAMS, tokens + 1)],
        state_slots=state_slots(resolved, 2),
    )


def state_slots(resolved: ResolvedConfig, rows: int) -> list[int]:
    return [row % WARM_UP_STATES for row in range(rows)] if resolved.num_states else []


def new_row(slot: int, params: SamplingParams, prompt_len: int) -> NewRow:
    history = [0] * prompt_len if params.needs_history else []
    return NewRow(slot, params, 0, prompt_len, history)
