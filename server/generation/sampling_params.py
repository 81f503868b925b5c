"""A checked request body -> the engine's SamplingParams, with the checks that need the model."""

from __future__ import annotations

from typing import Literal, LiteralString, NamedTuple, TypeVar

from runtime.messages import MAX_BANNED_TOKENS, Ready, SamplingParams
from server.apis.openai.sampling_schema import INT64, SamplingBody, token_biases
from server.errors import ContextTooLong, FieldPath, RequestError
from server.prompt.tokenizer import ChatTokenizer

Sequences = tuple[tuple[int, ...], ...]


def banned_sequences(words: list[str] | None, tokenizer: ChatTokenizer) -> Sequences:
    """The token sequences that spell the words, at the start of a text and after a space.

    Raises RequestError for a word that is too many tokens.
    """
    if not words:
        return ()
    spellings: list[str] = []
    for word in words:
        stripped = word.lstrip(" ") or word
        spellings += [stripped, " " + stripped]
    encoded = tokenizer.tokenizer.encode_batch_fast(spellings, add_special_tokens=False)
    found = [tuple(entry.ids) for entry in encoded]
    for place, ids in enumerate(found):
        if not ids or len(ids) > MAX_BANNED_TOKENS:
            param = FieldPath("bad_words", place // 2)
            raise RequestError(
                "{} is {} tokens: it must be 1 to {}, shorten it",
                (param, len(ids), MAX_BANNED_TOKENS),
            )
    return tuple(dict.fromkeys(found))


def check_token_sets(body: SamplingBody, banned: Sequences, stop_ids: tuple[int, ...]) -> None:
    """Raises RequestError if the fields of the request together allow no token."""
    allowed = set(body.allowed_token_ids or ())
    if not allowed:
        return
    alone = {ids[0] for ids in banned if len(ids) == 1}
    if allowed <= alone:
        raise RequestError(
            "{bad_words} bans every one of the {allowed_token_ids}: allow another token"
        )
    if body.min_tokens and allowed <= alone.union(stop_ids):
        raise RequestError(
            "{allowed_token_ids} holds only tokens that end the answer, which {min_tokens} "
            "forbids at first: allow another token or leave {min_tokens} out"
        )


N = TypeVar("N", int, float)
MIN_TEMPERATURE = 1e-3  # a softmax in float32 is greedy below it, or overflows


def sampling_params(
    body: SamplingBody,
    tokenizer: ChatTokenizer,
    ready: Ready,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str = "",
) -> SamplingParams:
    """Raises RequestError for values beyond the limits of the model."""
    defaults = tokenizer.defaults
    temperature = _first_set(body.temperature, defaults.temperature, 1.0)
    top_k = _first_set(body.top_k, defaults.top_k, 0)
    top_p = _first_set(body.top_p, defaults.top_p, 1.0)
    if top_p == 0:  # the limit of top_p towards 0: the likeliest token alone
        top_k, top_p = 1, 1.0
    stop_ids = _stop_ids(body, tokenizer, ready.vocab_size)
    banned = banned_sequences(body.bad_words, tokenizer)
    check_token_ids(body.allowed_token_ids or [], ready.vocab_size, FieldPath("allowed_token_ids"))
    check_token_sets(body, banned, stop_ids)
    reported = body.reported_ids()
    check_token_ids(reported, ready.vocab_size, FieldPath("logprob_token_ids"))
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            "{min_tokens} is {}: it must be at most {max_tokens}, here {}", (min_tokens, max_tokens)
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=top_p,
        top_k=max(0, min(top_k, ready.vocab_size)),
        min_p=_first_set(body.min_p, defaults.min_p, 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_first_set(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        seed=body.seed,
        min_tokens=min_tokens,
        stop_ids=stop_ids,
        logit_bias=token_biases(body.logit_bias, ready.vocab_size),
        logprobs=len(reported) or logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_ids=tuple(body.allowed_token_ids or ()),
        banned=banned,
        logprob_ids=tuple(reported),
        grammar=grammar,
    )


def _first_set(asked: N | None, recommended: N | None, default: N) -> N:
    if asked is not None:
        return asked
    return default if recommended is None else recommended


def _stop_ids(body: SamplingBody, tokenizer: ChatTokenizer, vocab_size: int) -> tuple[int, ...]:
    asked = body.stop_token_ids or []
    check_token_ids(asked, vocab_size, FieldPath("stop_token_ids"))
    return tuple(dict.fromkeys([*eos_ids_of(body, tokenizer), *asked]))


def eos_ids_of(body: SamplingBody, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The model's end-of-sequence ids, () with `ignore_eos`."""
    return () if body.ignore_eos else tokenizer.eos_ids


def check_token_ids(tokens: list[int], vocab_size: int, param: FieldPath) -> None:
    """Raises RequestError naming the first id that the model does not have."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(
            "{} holds {}, which is not a token id of this model: ids run from 0 to {}",
            (param, wrong, vocab_size - 1),
        )


def check_chars(num_chars: int, tokenizer: ChatTokenizer, ready: Ready, param: FieldPath) -> None:
    """Raises ContextTooLong for a text that exceeds the context however it is tokenized."""
    least, limit = num_chars // tokenizer.longest_token, ready.max_model_len
    if least > limit:
        prompt, where = _prompt(param)
        raise ContextTooLong(
            least,
            limit,
            prompt + " has {} characters, at least {} tokens: shorten the prompt",
            (*where, num_chars, least),
            param=param,
        )


def fit_to_context(
    prompt_len: int,
    wanted: int | None,
    limit: int,
    param: FieldPath,
    *,
    image_tokens: int = 0,
) -> int:
    """The number of tokens to generate; all that fit if the caller did not say.

    image_tokens: those of `prompt_len` that images take
    Raises RequestError for an empty prompt, ContextTooLong if prompt and answer exceed `limit`.
    """
    prompt, where = _prompt(param)
    if prompt_len == 0:
        raise RequestError(prompt + " has no tokens: send some text", where, param=param)
    if wanted is None and prompt_len < limit:
        return limit - prompt_len
    if prompt_len + (wanted or 0) <= limit and prompt_len < limit:
        return wanted or 0
    asked = "" if wanted is None else " and {max_tokens} is {}"
    remedy = "" if wanted is None else " or lower {max_tokens}"
    of_images = " ({} of them of images)" if image_tokens else ""
    shorten = "send fewer or smaller images, shorten" if image_tokens else "shorten"
    sizes = [prompt_len, *[image_tokens] * bool(image_tokens), *[wanted] * (wanted is not None)]
    raise ContextTooLong(
        prompt_len,
        limit,
        f"{prompt} has {{}} tokens{of_images}{asked}: {shorten} the prompt{remedy}",
        (*where, *sizes),
        param=param,
    )


def _prompt(param: FieldPath) -> tuple[LiteralString, tuple[FieldPath, ...]]:
    """The prompt of a message, by its field where a request may have several, and that field."""
    return ("the prompt {}", (param,)) if isinstance(param[-1], int) else ("the prompt", ())


class Truncation(NamedTuple):
    """`truncate_prompt_tokens` and `truncation_side` of a request."""

    max_tokens: int  # of a prompt
    side: Literal["left", "right"]  # the side that is truncated

    def text(self, text: str, tokenizer: ChatTokenizer, growth: int = 1) -> str:
        """No more text than max_tokens tokens can spell: the rest need not be tokenized.

        growth   ChatTokenizer.growth, for a text that it has rendered
        """
        most = (self.max_tokens + 1) * tokenizer.longest_token * growth
        return text[-most:] if self.side == "left" else text[:most]

    def tokens(self, tokens: list[int]) -> list[int]:
        return tokens[-self.max_tokens :] if self.side == "left" else tokens[: self.max_tokens]


def truncation_of(body: SamplingBody, wanted: int, ready: Ready) -> Truncation | None:
    """How to truncate the prompts of a request; None if it asks for no truncation.

    wanted   tokens to generate
    """
    asked = body.truncate_prompt_tokens
    if asked is None:
        return None
    room = max(1, ready.max_model_len - max(1, wanted))
    max_tokens = room if asked == -1 else min(asked, ready.max_model_len)
    return Truncation(max_tokens, body.truncation_side or "left")


def seed_of_choice(seed: int, index: int) -> int:
    """The seed of one of `n` completions: each has random numbers of its own."""
    return (seed + index + INT64) % (2 * INT64) - INT64
