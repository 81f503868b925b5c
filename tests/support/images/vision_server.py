"""A server whose scripted model reads images, and the forms that its APIs have for them."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

from server.batches.store import BatchStore
from server.images.addresses import AllowedHosts
from server.images.decoder import ImageDecoder
from server.images.fetch import ImageFetcher
from server.images.limits import ImageLimits
from server.images.reader import ImageReader
from tests.support.server.fake_engine import SPECIAL, FakeServer, fake_server, write_tokenizer

PAD = "<|image_pad|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [*SPECIAL, "<|tool|>", "<|vision_start|>", PAD, "<|vision_end|>"]
# A token is of 32 x 32 pixels, an image of 4 to 64 tokens.
LIMITS = ImageLimits(token=PAD, min_pixels=4096, max_pixels=65_536, max_images=4)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA, GENERATE = "/api/chat", "/api/generate"


@contextlib.contextmanager
def vision_server(
    folder: Path, *, limits: ImageLimits = LIMITS, fetcher: ImageFetcher | None = None, **more: Any
) -> Iterator[FakeServer]:
    """With files, in a data directory of its own."""
    reader = ImageReader(limits, fetcher or ImageFetcher(AllowedHosts()), ImageDecoder())
    write_tokenizer(folder, template=TEMPLATE, special=WORDS)
    data = str(folder / "data")
    store = BatchStore(Path(data), max_bytes=64 << 20)
    settings = {"prepared": True, "images": reader, "data_dir": data, "batches": store} | more
    try:
        with fake_server(folder, **settings) as server:  # type: ignore[arg-type]
            yield server
    finally:
        store.close()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chat_part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text_part(text: str = "What is it?") -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": list(parts)}]} | fields


def body_of(route: str, data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """A request of the route about one image, which stands before a question."""
    text, url = "What is it?", data_url(data, media_type)
    plain = base64.b64encode(data).decode()
    if route == CHAT:
        return chat(chat_part(url), text_part(text))
    if route == RESPONSES:
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        content = [image, {"type": "input_text", "text": text}]
        return {"model": "fake", "input": [{"role": "user", "content": content}]}
    if route == MESSAGES:
        source = {"type": "base64", "media_type": media_type, "data": plain}
        content = [{"type": "image", "source": source}, {"type": "text", "text": text}]
        return {
            "model": "fake",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": content}],
        }
    if route == GENERATE:
        return {"model": "fake", "stream": False, "prompt": text, "images": [plain]}
    message = {"role": "user", "content": text, "images": [plain]}
    return {"model": "fake", "stream": False, "messages": [message]}


def prompt_tokens(route: str, answer: dict[str, Any]) -> int:
    """What the answer's usage says of the prompt."""
    if route in (OLLAMA, GENERATE):
        return answer["prompt_eval_count"]
    return answer["usage"]["prompt_tokens" if route == CHAT else "input_tokens"]


def message_of(answer: httpx.Response) -> str:
    """An error's text, in whatever API's form."""
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]
