"""A conversation of many turns: what the prefix cache holds of each prompt, and what it saves.

    python -m benchmarks.server.bench_conversation qwen3.5-27b
    python -m benchmarks.server.bench_conversation qwen3.5-27b --reasoning 150 --template FILE
    python -m benchmarks.server.bench_conversation --tiny --tokens 6000 --serve="--device cpu"

A server is started with random weights of a published shape, or of a tiny hybrid model.  Each turn
sends the whole conversation and adds a message and an answer; the first message makes up for what
the others lack of --tokens.  --reasoning is the part of each answer that is left out of the
history, as templates leave out reasoning.  Of each turn:

  prompt   its tokens, as the chat template renders the conversation
  shared   the longest prefix that it has in common with an earlier prompt and its answer
  cached   the tokens of the prompt that were not computed (cached_tokens of `usage`)
  share    cached / shared; the last token that is shared is not counted, since the last token of an
           answer has been sampled and never computed
  ms       from the request to the first token, beside a server without a prefix cache

The exit code is 1 if a share is below --least, or a time above --first-token-ms.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server.bench_loads import server
from benchmarks.shapes import SHAPES, write_model
from benchmarks.shapes.published import BY_SLUG

# A byte is a token of the synthetic tokenizers.  Answers consist of letters, so that their text,
# in the next prompt, becomes the same tokens again.
LETTERS = string.ascii_lowercase
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a conversation, in tokens."""

    turns: int
    total: int
    message: int
    answer: int
    reasoning: int

    @property
    def first(self) -> int:
        """Of the first message."""
        kept = self.message + self.answer - self.reasoning
        return max(self.total - (self.turns - 1) * kept, self.message)


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int
    shared: int
    cached: int
    ms: float

    @property
    def share(self) -> float:
        """Of the tokens that could be cached; 1 if there are none."""
        return self.cached / (self.shared - 1) if self.shared > 1 else 1.0


@dataclass(slots=True)
class Conversation:
    """The messages so far, and what the server has computed."""

    url: str
    seed: int = 0
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    known: list[list[int]] = field(default_factory=list[list[int]])  # prompts, each with its answer

    def say(self, lengths: Lengths) -> Turn:
        """One more turn."""
        count = lengths.message if self.messages else lengths.first
        words = random.Random(f"{self.seed} {len(self.messages)}")
        self.messages.append({"role": "user", "content": "".join(words.choices(LETTERS, k=count))})
        prompt = self._tokens(messages=self.messages)
        shared = max((in_common(prompt, one) for one in self.known), default=0)
        text, cached, ms = self.ask(self.messages, lengths.answer)
        self.known.append(prompt + self._tokens(prompt=text, add_special_tokens=False))
        self.messages.append({"role": "assistant", "content": text[lengths.reasoning :]})
        return Turn(len(prompt), shared, cached, ms)

    def ask(self, messages: list[dict[str, str]], count: int) -> tuple[str, int, float]:
        """-> an answer of `count` tokens, cached tokens, milliseconds to the first token."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=TIMEOUT_SECONDS) as models:
            model = json.load(models)["data"][0]["id"]
        body = {
            "model": model, "messages": messages, "max_tokens": count, "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": self._tokens(prompt=LETTERS, add_special_tokens=False),
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        text, usage, first = "", {}, 0.0
        began = time.perf_counter()
        with self._post("/v1/chat/completions", body) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    # Where a template opens reasoning, random weights never close it.
                    delta = choice["delta"]
                    text += (said := delta.get("content") or delta.get("reasoning_content") or "")
                    if said and not first:
                        first = time.perf_counter()
        return text, usage["prompt_tokens_details"]["cached_tokens"], 1000 * (first - began)

    def _tokens(self, **body: Any) -> list[int]:
        with self._post("/tokenize", body) as answer:
            return json.load(answer)["tokens"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.code} {error.read().decode()}") from None


def in_common(one: list[int], other: list[int]) -> int:
    """The length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def talk(url: str, lengths: Lengths) -> tuple[list[Turn], list[dict[str, str]]]:
    """A whole conversation -> its turns, and its messages."""
    conversation = Conversation(url, seed=lengths.reasoning)
    # The first request of a server waits for what is prepared in the background.
    conversation.ask([{"role": "user", "content": "warm-up"}], 2)
    return [conversation.say(lengths) for _ in range(lengths.turns)], conversation.messages


def first_tokens(url: str, messages: list[dict[str, str]]) -> list[float]:
    """Milliseconds to the first token of each turn's prompt."""
    conversation = Conversation(url)
    conversation.ask([{"role": "user", "content": "warm-up"}], 2)
    return [
        conversation.ask(messages[: end + 1], 1)[2]
        for end, message in enumerate(messages)
        if message["role"] == "user"
    ]


def misses(turns: list[Turn], least: float, first_token_ms: float) -> list[str]:
    """What is worse than it should be, a line each.  The first turn has nothing to find."""
    found: list[str] = []
    for number, turn in enumerate(turns[1:], 2):
        if turn.share < least:
            found.append(f"turn {number}: {turn.share:.1%} of what is shared is cached")
        if first_token_ms and turn.ms > first_token_ms:
            found.append(f"turn {number}: the first token took {turn.ms:.1f} ms")
    return found


def write(args: argparse.Namespace, directory: Path) -> Path:
    """The model's directory."""
    model = write_model(args.shape, directory / "model", layers=args.layers)
    if args.tiny:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | TINY))
    if args.template is not None:
        (model / "chat_template.jinja").write_text(args.template.read_text())
    return model


def run(args: argparse.Namespace) -> int:
    lengths = Lengths(args.turns, args.tokens, args.message, args.answer, args.reasoning)
    options = ["--max-model-len", str(2 * args.tokens), *args.serve.split()]
    url = f"http://127.0.0.1:{args.port}"
    with tempfile.TemporaryDirectory() as temporary:
        model = write(args, Path(temporary))
        log = Path(temporary) / "serve.log"
        with server(model, args.port, log, options):
            turns, messages = talk(url, lengths)
        without: list[float] = []
        if not args.only_cached:
            with server(model, args.port, log, [*options, "--no-prefix-cache"]):
                without = first_tokens(url, messages)
    print("| turn | prompt | shared | cached | share | first token, ms | without the cache, ms |")
    print("|---" * 7 + "|")
    for number, turn in enumerate(turns, 1):
        other = f"{without[number - 1]:.1f}" if without else "-"
        share = f"{turn.share:.1%}" if turn.shared else "-"
        print(f"| {number} | {turn.prompt} | {turn.shared} | {turn.cached} | {share} "
              f"| {turn.ms:.1f} | {other} |")  # fmt: skip
    if args.json is not None:
        rows = [asdict(turn) | {"share": turn.share} for turn in turns]
        args.json.write_text(json.dumps({"turns": rows, "without_ms": without}))
    missed = misses(turns, args.least, args.first_token_ms)
    print("\n".join(missed) or f"every turn has at least {args.least:.0%}")
    return bool(missed)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", choices=sorted({*SHAPES, *BY_SLUG}),
                        default="qwen3.5-27b", metavar="SHAPE")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of its sizes")
    parser.add_argument("--layers", type=int, default=0, help="cut the model to so many")
    parser.add_argument("--template", type=Path, default=None, help="a chat template, in Jinja")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=30_000, help="of the whole conversation")
    parser.add_argument("--message", type=int, default=100, help="tokens of a message")
    parser.add_argument("--answer", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--reasoning", type=int, default=0, help="of them, left out of the history")
    parser.add_argument("--least", type=float, default=0.95, help="share of each turn")
    parser.add_argument("--first-token-ms", type=float, default=0.0, help="0: any time will do")
    parser.add_argument("--only-cached", action="store_true", help="no server without the cache")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--serve", default="", help="more options of `wavefill serve`")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there")
    return parser


if __name__ == "__main__":
    sys.exit(run(arguments().parse_args()))
