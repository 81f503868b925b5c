"""`allowed_token_ids` and `bad_words`: from what a caller wrote to ids for the sampler."""

from __future__ import annotations

from runtime.messages import MAX_BANNED_TOKENS
from server.errors import RequestError
from server.schema.sampling import SamplingBody
from server.tokenizer import ChatTokenizer

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
            param = f"bad_words[{place // 2}]"
            raise RequestError(
                f"`{param}` is {len(ids)} tokens: it must be 1 to {MAX_BANNED_TOKENS}, shorten it",
                param=param,
            )
    return tuple(dict.fromkeys(found))


def check_sets(body: SamplingBody, banned: Sequences, stop_ids: tuple[int, ...]) -> None:
    """Raises RequestError if the caller's own fields leave no token to say."""
    allowed = set(body.allowed_token_ids or ())
    if not allowed:
        return
    alone = {ids[0] for ids in banned if len(ids) == 1}
    if allowed <= alone:
        raise RequestError(
            "`bad_words` bans every one of the `allowed_token_ids`: allow another token",
            param="bad_words",
        )
    if body.min_tokens and allowed <= alone.union(stop_ids):
        raise RequestError(
            "`allowed_token_ids` holds only tokens that end the answer, which `min_tokens` "
            "forbids at first: allow another token or leave `min_tokens` out",
            param="allowed_token_ids",
        )
