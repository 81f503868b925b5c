"""Matchers: the constrained sequences of the grammar process and their token masks."""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from runtime.grammar.messages import Advanced, Compile, Compiled
from runtime.messages import MAX_LEXER_STATES

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

END_TOKEN = "<|wavefill-end-of-grammar|>"  # a token of our own: stop_ids replace it in masks
MAX_CACHED = 64  # compiled grammars, and
MAX_CACHED_BYTES = 4 << 20  # of their source text
MAX_ERROR = 300  # characters of an error
# Of a core, for a token of one sequence.  With 100,000 tokens in a vocabulary the largest schemas
# that are taken need up to twice that, but a tenth of it on average; grammars that can be read in
# many ways need ever more as the answer grows.
SLOW_SECONDS = 0.005
USUAL_SECONDS = 0.001  # at most, for most sequences
MAX_SLOW_SECONDS = 10.0  # beyond SLOW_SECONDS, of all tokens of one sequence
TOO_SLOW = (
    f"its tokens take much longer than {SLOW_SECONDS * 1000:g} ms each; there may be many ways to "
    "read one text, which a simpler form avoids"
)
TOO_MANY = (
    "too many things may come next at one place: make more properties required, or the form simpler"
)
LIMITS_OF_LIBRARY = ("Too many items", "Current row has")  # in its messages


@dataclass(slots=True)
class ConstrainedSequence:
    """One constrained sequence and its matcher."""

    matcher: LLMatcher
    stop_ids: tuple[int, ...]
    min_tokens: int
    num_tokens: int = 0  # tokens of the answer so far
    slow: bool = False  # its last mask took long, or was computed together with one that did
    slow_seconds: float = 0.0  # that its tokens have taken beyond SLOW_SECONDS each

    def compute_mask(self, address: int, width: int) -> None:
        """Write the mask of the next token, and count its time."""
        began = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(address, width)
        self.slow = self._count(time.thread_time() - began)

    def consume(self, tokens: list[int]) -> bool:
        """False if the grammar does not allow them."""
        self.num_tokens += len(tokens)
        began = time.thread_time()
        fit = self.matcher.consume_tokens(tokens)
        self._count(time.thread_time() - began)
        return fit

    def _count(self, seconds: float) -> bool:
        excess = max(0.0, seconds - SLOW_SECONDS)
        self.slow_seconds += excess
        return excess > 0


class TokenizerAdapter:
    """A tokenizer in the form that llguidance's TokenizerWrapper takes: the bytes of every token.

    From a tokenizer.json, llguidance would treat added tokens such as <tool_call> as special, which
    a grammar can only name by id: no text pattern would match them.
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
    """A tokenizer.json for llguidance, with an end token of our own after the others."""

    def __init__(self, tokenizer_file: str, vocab_size: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper
        from tokenizers import AddedToken, Tokenizer

        tokenizer = Tokenizer.from_file(tokenizer_file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True)])
        end = tokenizer.token_to_id(END_TOKEN)
        assert end is not None
        self.end = end
        self.num_bytes = (vocab_size + 7) // 8  # of a mask of the engine
        adapter = TokenizerAdapter(tokenizer, max(vocab_size, end + 1), end)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(adapter))
        self.row_bytes = (self.tokenizer.vocab_size + 31) // 32 * 4  # of a mask of llguidance
        self._padding = (1 << (vocab_size % 8)) - 1 if vocab_size % 8 else 0xFF

    def engine_mask(self, sequence: ConstrainedSequence, bits: bytearray) -> bytes | None:
        """The mask for the engine from that of llguidance; None if it allows no token.

        The stop ids of the request replace our end token.  Before `min_tokens` they are masked,
        unless the grammar allows nothing else.
        """
        accepting = bits[self.end >> 3] >> (self.end & 7) & 1
        del bits[self.num_bytes :]
        if self.end >> 3 < self.num_bytes:
            bits[self.end >> 3] &= ~(1 << (self.end & 7)) & 0xFF
        bits[-1] &= self._padding
        if sequence.num_tokens >= sequence.min_tokens:
            if accepting:
                for token in sequence.stop_ids:
                    bits[token >> 3] |= 1 << (token & 7)
        elif sequence.stop_ids:
            without_stops = bytearray(bits)
            for token in sequence.stop_ids:
                without_stops[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            if accepting or any(without_stops):
                bits = without_stops
        return bytes(bits) if any(bits) else None


@dataclass
class Matchers:
    """All constrained sequences, and a cache of compiled grammars.

    `compile` and `free` may run in one thread while others `advance` different sequences.
    """

    vocabulary: Vocabulary
    threads: int = 1
    sequences: dict[int, ConstrainedSequence] = field(
        default_factory=dict[int, ConstrainedSequence]
    )
    _cache: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict[str, "LLMatcher"])

    def compile(self, request: Compile) -> Compiled:
        """Create the matcher of a new sequence and its first mask."""
        matcher = self._matcher(request.grammar)
        if isinstance(matcher, str):
            return Compiled(request.key, error=f"the grammar cannot be used: {matcher}")
        sequence = ConstrainedSequence(matcher, request.stop_ids, request.min_tokens)
        first = self.masks([(request.key, sequence)])
        if first.errors or first.ended:
            error = first.errors.get(request.key, "the grammar allows the empty text alone")
            return Compiled(request.key, error=error)
        self.sequences[request.key] = sequence
        return Compiled(request.key, mask=first.masks[request.key])

    def _matcher(self, grammar: str) -> LLMatcher | str:
        """A matcher in its initial state, or an error."""
        from llguidance import LLMatcher, LLParserLimits

        compiled = self._cache.get(grammar)
        if compiled is None:
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            compiled = LLMatcher(self.vocabulary.tokenizer, grammar, log_level=0, limits=limits)
            if not compiled.is_error():
                compiled.compute_bitmask()  # the first mask costs most: copies reuse its cache
            if compiled.is_error():
                return shorten(compiled.get_error())
            self._cache[grammar] = compiled
            while len(self._cache) > 1 and (
                len(self._cache) > MAX_CACHED or sum(map(len, self._cache)) > MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)
        return compiled.deep_copy()

    def advance(self, tokens: Sequence[tuple[int, list[int]]]) -> Advanced:
        """Consume the newest tokens (key, tokens) of each sequence; unknown keys are ignored."""
        unfinished: list[tuple[int, ConstrainedSequence]] = []
        ended: list[int] = []
        errors: dict[int, str] = {}
        for key, newest in tokens:
            sequence = self.sequences.get(key)
            if sequence is None:
                continue
            if not sequence.consume(newest):
                error = shorten(sequence.matcher.get_error())
                errors[key] = error or f"tokens {newest} do not fit"
            elif sequence.slow_seconds > MAX_SLOW_SECONDS:
                errors[key] = TOO_SLOW
            elif sequence.matcher.is_stopped():
                ended.append(key)
            else:
                unfinished.append((key, sequence))
        advanced = self.masks(unfinished)
        return Advanced(advanced.masks, ended + advanced.ended, errors | advanced.errors)

    def masks(self, sequences: list[tuple[int, ConstrainedSequence]]) -> Advanced:
        width = self.vocabulary.row_bytes
        buffer = ctypes.create_string_buffer(max(1, width * len(sequences)))
        address = ctypes.addressof(buffer)
        self._compute_masks([sequence for _, sequence in sequences], address, width)
        view = memoryview(buffer)
        advanced = Advanced({})
        for index, (key, sequence) in enumerate(sequences):
            if sequence.matcher.is_error():
                advanced.errors[key] = shorten(sequence.matcher.get_error())
                continue
            accepting = sequence.matcher.is_accepting()
            bits = bytearray(view[index * width : index * width + width])
            mask = self.vocabulary.engine_mask(sequence, bits)
            if mask is not None:
                advanced.masks[key] = mask
            elif accepting:
                advanced.ended.append(key)
            else:
                advanced.errors[key] = "no token of this model can continue the answer"
        return advanced

    def _compute_masks(
        self, sequences: list[ConstrainedSequence], address: int, width: int
    ) -> None:
        """Write one behind the other.  Where several take long, each is suspected to be slow."""
        if len(sequences) == 1:
            sequences[0].compute_mask(address, width)
        elif sequences:
            work = [(sequence.matcher, index) for index, sequence in enumerate(sequences)]
            began = time.monotonic()
            self._executor.unsafe_compute_mask_ptr(work, address, width, len(sequences))
            usual = SLOW_SECONDS + USUAL_SECONDS * len(sequences) / self.threads
            if time.monotonic() - began > usual:
                for sequence in sequences:
                    sequence.slow = True

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self.threads)

    def is_slow(self, key: int) -> bool:
        """Whether others should not wait for this sequence's next mask."""
        sequence = self.sequences.get(key)
        return sequence is not None and sequence.slow

    def free(self, key: int) -> None:
        self.sequences.pop(key, None)


def shorten(error: str) -> str:
    """A message of llguidance, which may quote the grammar: its first MAX_ERROR characters."""
    if any(words in error for words in LIMITS_OF_LIBRARY):
        return TOO_MANY
    return error.replace("<non-verbose/>", "").strip()[:MAX_ERROR]
