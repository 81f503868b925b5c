"""Matchers: constrained sequences inside the grammar process, and what each may say next."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.grammar.messages import Advanced, Compile, Compiled
from runtime.messages import MAX_LEXER_STATES

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

END = "<|wavefill-end-of-grammar|>"  # our own end token: the model's are set by stop_ids
MAX_CACHED = 64  # compiled grammars kept for the next request, and
MAX_CACHED_BYTES = 4 << 20  # the text they came from
MAX_ERROR = 300  # characters of an error


@dataclass(slots=True)
class GrammarRow:
    """One constrained sequence."""

    matcher: LLMatcher
    stop_ids: tuple[int, ...]
    min_tokens: int
    count: int = 0  # tokens of the answer so far


class TokenizerAdapter:
    """A tokenizer as the library takes one that is not its own: the bytes of every token.

    Reading a tokenizer.json itself, it would hold added words such as <tool_call> to be special,
    which only their ids can name: no text, not even any text, would allow them.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int) -> None:
        from llguidance import LLTokenizer

        plain = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=end)
        self.tokens = [plain.decode_bytes([id]) for id in range(plain.vocab_size)]
        added = tokenizer.get_added_tokens_decoder()
        for id, token in added.items():
            self.tokens[id] = token.content.encode()
        self.special_token_ids = [id for id, token in added.items() if token.special]
        self.eos_token_id = end
        self.bos_token_id = None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class Vocabulary:
    """The library's view of a tokenizer.json, with an end token of our own behind the others."""

    def __init__(self, tokenizer_file: str, vocab_size: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper
        from tokenizers import AddedToken, Tokenizer

        tokenizer = Tokenizer.from_file(tokenizer_file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_special_tokens([AddedToken(END, special=True)])
        end = tokenizer.token_to_id(END)
        assert end is not None
        self.end = end
        self.num_bytes = (vocab_size + 7) // 8  # of a mask for the engine
        words = TokenizerAdapter(tokenizer, max(vocab_size, end + 1), end)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(words))
        self.row_bytes = (self.tokenizer.vocab_size + 31) // 32 * 4  # of a mask by the library
        self._padding = (1 << (vocab_size % 8)) - 1 if vocab_size % 8 else 0xFF

    def finish(self, row: GrammarRow, bits: bytearray) -> bytes | None:
        """The engine's mask of what the library allows; None if nothing is.

        The end tokens of the request stand in for ours.  Before `min_tokens` they are taken away,
        unless the grammar has nothing else.
        """
        accepting = bits[self.end >> 3] >> (self.end & 7) & 1
        del bits[self.num_bytes :]
        if self.end >> 3 < self.num_bytes:
            bits[self.end >> 3] &= ~(1 << (self.end & 7)) & 0xFF
        bits[-1] &= self._padding
        if row.count >= row.min_tokens:
            if accepting:
                for token in row.stop_ids:
                    bits[token >> 3] |= 1 << (token & 7)
        elif row.stop_ids:
            fewer = bytearray(bits)
            for token in row.stop_ids:
                fewer[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            if accepting or any(fewer):
                bits = fewer
        return bytes(bits) if any(bits) else None


@dataclass
class Matchers:
    """All constrained sequences, and the grammars that were compiled last.

    `compile` may run in one thread while `advance` and `free` run in another.
    """

    vocabulary: Vocabulary
    threads: int = 1
    rows: dict[int, GrammarRow] = field(default_factory=dict[int, GrammarRow])
    _cache: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict[str, "LLMatcher"])
    _executor: LLExecutor | None = None

    def compile(self, request: Compile) -> Compiled:
        """Make the matcher of a new sequence and its first mask."""
        matcher = self._matcher(request.grammar)
        if isinstance(matcher, str):
            return Compiled(request.key, error=matcher)
        row = GrammarRow(matcher, request.stop_ids, request.min_tokens)
        first = self.masks([(request.key, row)])
        if first.errors or first.ended:
            error = first.errors.get(request.key, "the grammar allows the empty text alone")
            return Compiled(request.key, error=error)
        self.rows[request.key] = row
        return Compiled(request.key, mask=first.masks[request.key])

    def _matcher(self, grammar: str) -> LLMatcher | str:
        """A matcher in its first state, or why there is none."""
        from llguidance import LLMatcher, LLParserLimits

        known = self._cache.get(grammar)
        if known is None:
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            known = LLMatcher(self.vocabulary.tokenizer, grammar, log_level=0, limits=limits)
            if not known.is_error():
                known.compute_bitmask()  # the first mask costs most: copies of it are warm
            if known.is_error():
                return short(known.get_error())
            self._cache[grammar] = known
            while len(self._cache) > 1 and (
                len(self._cache) > MAX_CACHED or sum(map(len, self._cache)) > MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)
        return known.deep_copy()

    def advance(self, tokens: Sequence[tuple[int, int]]) -> Advanced:
        """Take one token for each of some sequences.  Keys that are not known are left out."""
        going_on: list[tuple[int, GrammarRow]] = []
        ended: list[int] = []
        errors: dict[int, str] = {}
        for key, token in tokens:
            row = self.rows.get(key)
            if row is None:
                continue
            row.count += 1
            if not row.matcher.consume_token(token):
                errors[key] = short(row.matcher.get_error()) or f"token {token} does not fit"
            elif row.matcher.is_stopped():
                ended.append(key)
            else:
                going_on.append((key, row))
        next_ones = self.masks(going_on)
        return Advanced(next_ones.masks, ended + next_ones.ended, errors | next_ones.errors)

    def masks(self, rows: list[tuple[int, GrammarRow]]) -> Advanced:
        width = self.vocabulary.row_bytes
        buffer = ctypes.create_string_buffer(max(1, width * len(rows)))
        address = ctypes.addressof(buffer)
        if len(rows) == 1:
            rows[0][1].matcher.unsafe_compute_mask_ptr(address, width)
        elif rows:
            work = [(row.matcher, place) for place, (_, row) in enumerate(rows)]
            self._parallel().unsafe_compute_mask_ptr(work, address, width, len(rows))
        view = memoryview(buffer)
        answer = Advanced({})
        for place, (key, row) in enumerate(rows):
            if row.matcher.is_error():
                answer.errors[key] = short(row.matcher.get_error())
                continue
            accepting = row.matcher.is_accepting()
            bits = bytearray(view[place * width : place * width + width])
            mask = self.vocabulary.finish(row, bits)
            if mask is not None:
                answer.masks[key] = mask
            elif accepting:
                answer.ended.append(key)
            else:
                answer.errors[key] = "no token of this model can continue the answer"
        return answer

    def _parallel(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self.threads)
        return self._executor

    def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.rows.pop(key, None)


def short(error: str) -> str:
    """The first lines of the library's message, which may quote the whole grammar."""
    return error.replace("<non-verbose/>", "").strip()[:MAX_ERROR]
