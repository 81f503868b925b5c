"""What a run sends, and when: prompts of fixed length and the arrivals of an open loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}
FIRST_TOKEN_ID = 100  # below it, many vocabularies have control tokens


WORD_TEXT = """
able air area arm back base bear bird blue boat body book bread bring brown build call card
care case chair city clear cloud coat cold come cook corn cost cover cross cut dark day deep
desk door draw dream dry ear earth east edge egg even eye face fact fall far farm fast field
find fine fire fish floor fly food foot form four free fresh game garden gate give glass go
gold good grass green ground grow hair half hall hand hard head hear heart heat help high
hill hold home hope horse hour house ice idea ink iron island join jump keep key kind lake
lamp land large late leaf learn left letter light line lion list long look low main make map
mark meal milk mill mind moon more morning move music name near neck net new nice night north
"""
WORDS = tuple(WORD_TEXT.split())


@dataclass(frozen=True)
class Workload:
    """Requests of one size.  The same seed gives the same prompts; no two share a prefix."""

    endpoint: Endpoint
    model: str
    input_len: int  # tokens, or words where prompts are words
    output_len: int
    vocab_size: int | None  # prompts are ids below it; None: prompts are words
    ignore_eos: bool
    temperature: float
    seed: int

    def body(self, index: int, stage: str = "measured") -> dict[str, object]:
        """The JSON body of request `index`; another `stage` has other prompts."""
        fields: dict[str, object] = {
            "model": self.model,
            "max_tokens": self.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True  # known to vLLM, SGLang and Wavefill; OpenAI refuses it
        prompt = self.prompt(random.Random(f"{self.seed}/{stage}/{index}"))
        if self.endpoint == "chat":
            return fields | {"messages": [{"role": "user", "content": prompt}]}
        return fields | {"prompt": prompt}

    def prompt(self, draw: random.Random) -> str | list[int]:
        if self.vocab_size is None:
            return " ".join(draw.choices(WORDS, k=self.input_len))
        return draw.choices(range(FIRST_TOKEN_ID, self.vocab_size), k=self.input_len)


def poisson_arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests are due: `rate` a second, gaps exponential."""
    draw = random.Random(seed)
    due = 0.0
    for _ in range(count):
        yield due
        due += draw.expovariate(rate)
