"""How many log-probabilities a request may ask for in all.

Each field has a limit of its own, but their product is what has to be held until a whole answer is
sent: 128 answers of 100,000 tokens with 21 each would take 30 GB.
"""

from __future__ import annotations

from runtime.messages import SamplingParams
from server.errors import RequestError
from server.schema.sampling import SamplingBody

# 123 bytes each until all are there, and 95 as JSON.  One answer of 190,000 tokens may have 21 of
# each, so that one alone is told to send `max_tokens` only where the context is longer than that.
MOST_SCORES = 4_000_000


def check_scores(
    body: SamplingBody,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    copies: int,
    names: tuple[str, str],
) -> None:
    """Raises RequestError if the answers to `prompts`, `copies` to each, could hold too many.

    names  the fields that ask for likely tokens, and for copies
    """
    likely, several = names
    answers = len(prompts) * copies
    per_token = 0 if params.logprobs is None or body.stream else 1 + params.logprobs
    per_prompt_token = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    of_answers = answers * params.max_tokens * per_token
    of_prompts = sum(map(len, prompts)) * copies * per_prompt_token
    if of_answers + of_prompts <= MOST_SCORES:
        return
    # `echo` shows the prompt's with as many alternatives as the answer's have.
    of_prompt = likely if body.prompt_logprobs is None else "prompt_logprobs"
    parts: list[str] = []
    fields = [f"`{several}`"] if copies > 1 else []
    if of_answers:
        parts.append(f"{answers} x {params.max_tokens} generated tokens x {per_token}")
        fields += ["`max_tokens`", f"`{likely}`"]
    if of_prompts:
        parts.append(f"{of_prompts // per_prompt_token} prompt tokens x {per_prompt_token}")
        fields += [f"`{of_prompt}`"]
    remedies = [f"lower {' or '.join(dict.fromkeys(fields))}"]
    remedies += ["send fewer prompts"] if len(prompts) > 1 else []
    may_stream = body.prompt_logprobs is None and several != "best_of"
    if may_stream and of_prompts <= MOST_SCORES:
        remedies.append("set `stream` to true")
    raise RequestError(
        f"up to {of_answers + of_prompts} log-probabilities are asked for "
        f"({' and '.join(parts)}), a whole answer may hold {MOST_SCORES}: "
        f"{', or '.join(remedies)}",
        param=likely if of_answers >= of_prompts else of_prompt,
    )
