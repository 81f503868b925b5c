"""Log-probabilities in the formats of chat completions, text completions and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString

import orjson

from runtime.messages import SamplingParams, TokenLogprob
from server.apis.openai.sampling_schema import SamplingBody
from server.errors import FieldPath, RequestError
from server.generation.answer_text import ScoredToken
from server.prompt.tokenizer import ChatTokenizer

# 123 bytes each in memory, and 95 as JSON.  One answer of 190,000 tokens with 21 for each fits.
# Each field of a request has a limit of its own, but an answer that is not streamed holds their
# product: 128 answers of 100,000 tokens with 21 log-probabilities each would take 30 GB.
MAX_SCORES = 4_000_000


def check_scores(
    body: SamplingBody,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    copies: int,
    names: tuple[LiteralString, LiteralString],
) -> None:
    """Raises RequestError if the answers to `prompts`, `copies` to each, could hold too many.

    names  the fields for the number of alternatives, and of copies
    """
    likely, several = names
    answers = len(prompts) * copies
    per_token = 0 if params.logprobs is None or body.stream else 1 + params.logprobs
    per_prompt_token = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    of_answers = answers * params.max_tokens * per_token
    of_prompts = sum(map(len, prompts)) * copies * per_prompt_token
    if of_answers + of_prompts <= MAX_SCORES:
        return
    # `echo` shows the prompt's with as many alternatives as the answer's have.
    of_prompt: LiteralString = likely if body.prompt_logprobs is None else "prompt_logprobs"
    parts: list[str] = []
    fields: list[LiteralString] = [several] if copies > 1 else []
    if of_answers:
        parts.append(f"{answers} x {params.max_tokens} generated tokens x {per_token}")
        fields.extend(("max_tokens", likely))
    if of_prompts:
        parts.append(f"{of_prompts // per_prompt_token} prompt tokens x {per_prompt_token}")
        fields.append(of_prompt)
    remedies: LiteralString = "lower {" + "} or {".join(dict.fromkeys(fields)) + "}"
    remedies += ", or send fewer prompts" if len(prompts) > 1 else ""
    may_stream = body.prompt_logprobs is None and several != "best_of"
    if may_stream and of_prompts <= MAX_SCORES:
        remedies += ", or set {stream} to true"
    raise RequestError(
        "up to {} log-probabilities are asked for ({}), a whole answer may hold {}: " + remedies,
        (of_answers + of_prompts, " and ".join(parts), MAX_SCORES),
        param=FieldPath(likely if of_answers >= of_prompts else of_prompt),
    )


CHARS_PER_LOGPROB = 4  # characters that take as long as one log-probability of a token
LOWEST = -9999.0  # JSON has no infinity; OpenAI reports this for impossible tokens


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def _name(tokenizer: ChatTokenizer, token: int, as_id: bool) -> str:
    """A token's name: its text, or its id in vLLM's format.

    Part of a character is named by its bytes, as OpenAI does: these names are keys, and all parts
    would have the same text.
    """
    if as_id:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([_byte_name(byte) for byte in raw])


def _byte_name(byte: int) -> str:
    plain = 0x20 <= byte < 0x7F and byte != ord("\\")
    return chr(byte) if plain else f"\\x{byte:02x}"


def _entry(tokenizer: ChatTokenizer, token: int, logprob: float, as_id: bool) -> dict[str, object]:
    raw = tokenizer.token_bytes(token)
    return {
        "token": _name(tokenizer, token, as_id),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }


def chat_logprobs(
    tokenizer: ChatTokenizer, scored: Sequence[ScoredToken], top: int, *, as_ids: bool = False
) -> list[orjson.Fragment]:
    """`choices[].logprobs.content` of a chat completion, with `top` alternatives a token.

    As JSON, which takes a quarter of the memory of objects and a sixth of the time.
    as_ids   tokens are named by their ids
    """
    content: list[orjson.Fragment] = []
    for entry in scored:
        score = entry.score
        assert score is not None, "a generated token has a log-probability"
        item = _entry(tokenizer, entry.token, score.logprob, as_ids)
        item["top_logprobs"] = [_entry(tokenizer, *pair, as_ids) for pair in score.top[:top]]
        content.append(orjson.Fragment(orjson.dumps(item)))
    return content


def text_logprobs(
    tokenizer: ChatTokenizer,
    scored: Sequence[ScoredToken],
    top: int,
    start: int,
    *,
    as_ids: bool = False,
) -> dict[str, object]:
    """`choices[].logprobs` of a text completion whose text begins at character `start`.

    as_ids  tokens are named by their ids
    """
    tops: list[dict[str, float] | None] = []
    words = [_name(tokenizer, entry.token, as_ids) for entry in scored]
    for word, entry in zip(words, scored, strict=True):
        if entry.score is None:
            tops.append(None)
            continue
        alternatives = {
            _name(tokenizer, token, as_ids): finite(logprob)
            for token, logprob in reversed(entry.score.top[:top])
        }
        best_first = dict(reversed(alternatives.items()))
        best_first.setdefault(word, finite(entry.score.logprob))
        tops.append(best_first)
    return {
        "tokens": words,
        "token_logprobs": [entry.score and finite(entry.score.logprob) for entry in scored],
        "top_logprobs": tops,
        "text_offset": [start + entry.offset for entry in scored],
    }


def prompt_logprobs(
    tokenizer: ChatTokenizer, prompt: list[int], scores: list[TokenLogprob | None] | None, top: int
) -> list[dict[str, object] | None] | None:
    """A list with one entry a prompt token: null for the first, then {token id: score}."""
    if scores is None:
        return None
    entries: list[dict[str, object] | None] = []
    for token, score in zip(prompt, scores, strict=True):
        if score is None:
            entries.append(None)
            continue
        ranked = [(id, logprob, place + 1) for place, (id, logprob) in enumerate(score.top[:top])]
        if token not in (id for id, _, _ in ranked):
            ranked.append((token, score.logprob, score.rank))
        entries.append(
            {
                str(id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(id).decode("utf-8", "replace"),
                }
                for id, logprob, rank in ranked
            }
        )
    return entries


def prompt_scored(
    tokenizer: ChatTokenizer, prompt: list[int], scores: list[TokenLogprob | None]
) -> list[ScoredToken]:
    """The prompt's tokens with their offsets in its text, for `echo`."""
    detokenizer = tokenizer.detokenizer(skip_special=False)
    offset = 0
    scored: list[ScoredToken] = []
    for token, score in zip(prompt, scores, strict=True):
        scored.append(ScoredToken(token, offset, score))
        offset += len(detokenizer.feed([token]))
    return scored
