"""Serve a Qwen3-VL shape with random weights, and measure requests with images through HTTP.

    python -m benchmarks.images.bench_images [--only alone,beside] [--serve "OPTIONS"]

alone   one caller at a time, an image and 64 tokens of answer: time to first token, time of the
        encoder, and the same prompt length without an image
beside  32 plain streams, beside 32 callers with an image each, and beside 32 callers whose text
        prompts have as many tokens: inter-token latency of the plain streams, and their ratio

No two images are alike, and all are made before the clock runs.  Answers are greedy, with
ignore-eos; prefixes and features are not shared.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.server.bench_loads import server
from benchmarks.shapes import FAMILIES, write_model
from benchmarks.shapes.published import slug
from server.bench.client import BenchClient
from server.bench.metrics import RequestResult
from server.bench.workload import Workload

VOCABULARY = 30_000
SEEING = [slug(name) for name, fields in FAMILIES.items() if "vision_config" in fields]


@dataclass(frozen=True)
class Setting:
    url: str
    model: str
    output_len: int
    pictures: list[str]  # URLs; each is sent once
    numbers: Iterator[int]  # of prompts

    def ask(self, client: BenchClient, body: dict[str, Any], *, chat: bool) -> Any:
        workload = Workload(
            "chat" if chat else "completions", self.model, 0, 0, VOCABULARY, True, 0.0, 0
        )
        common = {"model": self.model, "temperature": 0, "stream": True, "ignore_eos": True}
        usage = {"stream_options": {"include_usage": True}}
        return client.ask(workload, {**common, **usage, **body}, time.perf_counter())

    async def with_image(self, client: BenchClient) -> RequestResult:
        if not self.pictures:
            raise SystemExit("all pictures were sent: give a larger --pictures")
        url = self.pictures.pop()
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What?"},
        ]
        body = {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": self.output_len,
        }
        return _checked(await self.ask(client, body, chat=True))

    async def with_text(self, client: BenchClient, length: int, output_len: int) -> RequestResult:
        draw = np.random.default_rng(next(self.numbers))
        prompt = draw.integers(500, VOCABULARY, length).tolist()
        body = {"prompt": prompt, "max_tokens": output_len}
        return _checked(await self.ask(client, body, chat=False))


def _checked(outcome: Any) -> RequestResult:
    if not isinstance(outcome, RequestResult):
        raise SystemExit(f"a request failed: {outcome}")
    return outcome


def picture_urls(side: int, kind: str, count: int, first: int) -> list[str]:
    """As picture_url, by as many threads as there are cores."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda number: picture_url(side, kind, first + number), range(count)))


def picture_url(side: int, kind: str, number: int) -> str:
    """A data: URL of a picture of smooth colours with some noise, another for each number."""
    draw = np.random.default_rng(number)
    coarse = draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))
    noise = draw.integers(-8, 8, (side, side, 3), dtype=np.int16)
    values = (smooth.astype(np.int16) + noise).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    options = {"compress_level": 1} if kind == "PNG" else {"quality": 90}
    Image.fromarray(values).save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def ttft_ms(result: RequestResult) -> float:
    return 1000 * (result.deliveries[0] - result.start)


def gaps_ms(results: list[RequestResult]) -> list[float]:
    return [
        1000 * (now - before)
        for result in results
        for before, now in itertools.pairwise(result.deliveries)
    ]


async def alone(setting: Setting, rounds: int) -> None:
    async with BenchClient(f"{setting.url}/v1", None, 120.0) as client:
        for _ in range(2):
            await setting.with_image(client)
        before = [metric(setting.url, name) for name in ENCODER]
        images = [await setting.with_image(client) for _ in range(rounds)]
        await asyncio.sleep(1.5)  # the counters come once a second
        encoded, seconds = (
            metric(setting.url, name) - past for name, past in zip(ENCODER, before, strict=True)
        )
        length = images[0].prompt_tokens
        texts = [await setting.with_text(client, length, setting.output_len) for _ in range(rounds)]
    for title, results in (("image", images), ("text", texts)):
        times, gaps = [ttft_ms(one) for one in results], gaps_ms(results)
        print(
            f"alone, {title}: {length} prompt tokens, TTFT p50 {np.median(times):.1f} ms "
            f"(least {min(times):.1f}), ITL p50 {np.median(gaps):.2f} ms"
        )
    per_image = 1000 * seconds / max(encoded, 1)
    print(f"encoder: {encoded:.0f} images, {per_image:.1f} ms each", flush=True)


ENCODER = ("wavefill_images_encoded_total", "wavefill_image_encoder_seconds_total")


async def beside(setting: Setting, callers: int, seconds: float) -> None:
    """The gaps of 32 plain streams beside callers in a closed loop."""
    found: dict[str, float] = {}
    async with BenchClient(f"{setting.url}/v1", None, 300.0) as client:
        length = (await setting.with_image(client)).prompt_tokens
        for title in ("text", "image"):
            asked: list[RequestResult] = []
            until = time.perf_counter() + seconds

            async def plain(until: float = until) -> list[RequestResult]:
                answers: list[RequestResult] = []
                while time.perf_counter() < until:
                    answers.append(await setting.with_text(client, 128, 256))
                return answers

            async def caller(
                title: str = title, until: float = until, asked: list[RequestResult] = asked
            ) -> None:
                while time.perf_counter() < until:
                    if title == "image":
                        asked.append(await setting.with_image(client))
                    else:
                        asked.append(await setting.with_text(client, length, setting.output_len))

            streams = asyncio.gather(*(plain() for _ in range(callers)))
            await asyncio.gather(*(caller() for _ in range(callers)))
            gaps = gaps_ms([one for answers in await streams for one in answers])
            found[title] = float(np.percentile(gaps, 99))
            times = [ttft_ms(one) for one in asked]
            print(
                f"plain streams beside {callers} callers with {title} ({length} tokens): ITL p50 "
                f"{np.median(gaps):.2f}, p99 {found[title]:.2f}, worst {max(gaps):.1f} ms; "
                f"{len(asked)} prompts, their TTFT p50 {np.median(times):.0f} ms",
                flush=True,
            )
    print(f"ITL p99 beside images is {found['image'] / found['text']:.2f} times that beside text")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SEEING, default="qwen3-vl-8b")
    parser.add_argument("--only", default="alone,beside")
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's sides")
    parser.add_argument("--kind", choices=("JPEG", "PNG"), default="JPEG")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=400, help="that may be sent in all")
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each half of beside")
    parser.add_argument("--layers", type=int, default=0, help="cut the model, to try this out")
    parser.add_argument("--blocks", type=int, default=0, help="cut the encoder, to try this out")
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--serve", default="", help="more options of `wavefill serve`")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    cases = {"alone": lambda one: alone(one, args.rounds)}
    cases["beside"] = lambda one: beside(one, args.callers, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(
            args.shape, Path(folder) / args.shape, layers=args.layers, blocks=args.blocks
        )
        options = ["--max-model-len", "16384", "--served-model-name", args.shape]
        log = Path(folder) / "serve.log"
        with server(model, args.port, log, [*options, *args.serve.split()]) as ready:
            print(f"{args.shape}: ready after {ready:.1f} s", flush=True)
            url = f"http://127.0.0.1:{args.port}"
            seed = int(time.time())
            pictures = picture_urls(args.side, args.kind, args.pictures, seed)
            setting = Setting(url, args.shape, args.output_len, pictures, itertools.count(seed))
            for name in filter(None, args.only.split(",")):
                asyncio.run(cases[name](setting))


if __name__ == "__main__":
    main()
