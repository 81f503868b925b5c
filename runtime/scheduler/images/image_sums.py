"""ImageSums: what the images of many requests will take in the encoder, without a list of them."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.messages import PromptImage

# Of each stage, operations in 10^9: for a token of an image, and for a pair of its tokens.
EncoderCosts = tuple[tuple[float, float], ...]


@dataclass(slots=True)
class ImageSums:
    count: int = 0
    tokens: int = 0
    pairs: int = 0  # of tokens of the same image

    def add(self, image: PromptImage, sign: int = 1) -> None:
        """sign: -1 takes it away"""
        self.count += sign
        self.tokens += sign * image.num_tokens
        self.pairs += sign * image.num_tokens**2

    def work(self, encoder: EncoderCosts) -> tuple[int, float]:
        """-> stages of the encoder for all of them, and operations in 10^9."""
        of_token, of_pair = (sum(stage[which] for stage in encoder) for which in (0, 1))
        return self.count * len(encoder), self.tokens * of_token + self.pairs * of_pair
