"""ImageFeatures: of which images the device has features, and which one it is encoding.

The device keeps what batches name, so that all ranks of a model do the same.  Features are
kept by the digest of their pixels, within a limit of bytes, the least recently used leaving first.
Those that a prompt in prefill has yet to read stay.  One image at a time is half-way through the
encoder; it has its place among the bytes from its first stage on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from runtime.config import ResolvedConfig
from runtime.messages import PromptImage
from runtime.scheduler.batch import ImageStages
from runtime.scheduler.sequence import Sequence


@dataclass(slots=True)
class BegunImage:
    """An image half-way through the encoder."""

    digest: bytes
    num_tokens: int
    stage: int = 0  # the next one


class ImageFeatures:
    def __init__(self, resolved: ResolvedConfig) -> None:
        self.num_stages = len(resolved.encoder_stages)
        self.limit = resolved.image_cache_bytes
        self.num_bytes = 0  # of all that are there, and of the one that is begun
        self.num_hits = 0  # images of prompts whose features were there
        self.begun: BegunImage | None = None
        self._token_bytes = resolved.image_token_bytes
        self._tokens: OrderedDict[bytes, int] = OrderedDict()  # of those that are there
        self._unread: set[bytes] = set()  # those that no prompt has read
        self.dropped: dict[bytes, None] = {}  # of which the device does not know yet

    def __contains__(self, digest: bytes) -> bool:
        """Whether features are there, or will be before the model of the step being scheduled."""
        return digest in self._tokens

    def read(self, digest: bytes, *, first: bool) -> None:
        """A chunk of a prompt reads the features of an image; `first`: no chunk before it did."""
        self._tokens.move_to_end(digest)
        if digest in self._unread:
            self._unread.discard(digest)
        else:
            self.num_hits += first

    def try_begin(self, image: PromptImage, sequences: Iterable[Sequence]) -> bool:
        """Make room for an image, and begin it.  False: there is none yet.

        What `sequences` can read at once stays.  Without that, an image is begun however large.
        """
        assert self.begun is None and image.digest not in self
        needed = image.num_tokens * self._token_bytes
        wanted = self._readable(sequences)
        held = sum(self._tokens[digest] for digest in wanted)
        if held and held * self._token_bytes + needed > self.limit:
            return False
        for digest in list(self._tokens):
            if self.num_bytes + needed <= self.limit:
                break
            if digest not in wanted:
                self._unread.discard(digest)
                self._drop(digest, self._tokens.pop(digest))
        self.dropped.pop(image.digest, None)
        self.begun = BegunImage(image.digest, image.num_tokens)
        self.num_bytes += needed
        return True

    def _readable(self, sequences: Iterable[Sequence]) -> set[bytes]:
        """The features that are next for some sequence: it needs no other image before."""
        found: set[bytes] = set()
        for sequence in sequences:
            if sequence.request.images:
                digests = (image.digest for image in unread_images(sequence))
                found.update(takewhile(self.__contains__, digests))
        return found

    def advance(self, count: int, image: PromptImage | None) -> ImageStages:
        """The next stages of the image that is begun; `image`: itself, if they are the first."""
        begun = self.begun
        assert begun is not None and (image is not None or begun.stage)
        first, begun.stage = begun.stage, begun.stage + count
        if begun.stage == self.num_stages:
            self._tokens[begun.digest] = begun.num_tokens
            self._unread.add(begun.digest)
            self.begun = None
        return ImageStages(begun.digest, first, begun.stage, None if first else image)

    def give_up_unless_wanted(self, sequences: Iterable[Sequence]) -> None:
        """Free what there is of the image that is begun, unless one of `sequences` needs it."""
        begun = self.begun
        if begun is None or any(begun_for(begun, sequence) for sequence in sequences):
            return
        self.begun = None
        self._drop(begun.digest, begun.num_tokens)

    def _drop(self, digest: bytes, num_tokens: int) -> None:
        self.num_bytes -= num_tokens * self._token_bytes
        self.dropped[digest] = None

    def take_dropped(self) -> tuple[bytes, ...]:
        """What was dropped since the last step: the device hears of it once."""
        dropped, self.dropped = tuple(self.dropped), {}
        return dropped

    def check_integrity(self) -> None:
        """Assert that the bytes are those of the images.  For tests."""
        tokens = sum(self._tokens.values())
        tokens += 0 if self.begun is None else self.begun.num_tokens
        assert tokens * self._token_bytes == self.num_bytes
        assert self.begun is None or self.begun.digest not in self
        assert not any(digest in self for digest in self.dropped)
        assert self._unread <= self._tokens.keys()


def begun_for(begun: BegunImage, sequence: Sequence) -> bool:
    """Whether a sequence has yet to read the image."""
    if not sequence.request.images:
        return False
    return any(image.digest == begun.digest for image in unread_images(sequence))


def unread_images(sequence: Sequence) -> list[PromptImage]:
    """The images of a sequence that have tokens left to compute."""
    computed = sequence.num_computed_tokens
    return [one for one in sequence.request.images if one.start + one.num_tokens > computed]
