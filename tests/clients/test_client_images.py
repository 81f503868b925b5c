"""Images as each client sends them: all get the answer of a chat completion about the same."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.images.pictures import encoded, noise
from tests.support.images.seeing_server import MODEL, STEPS, SeeingServer
from tests.support.images.vision_server import data_url
from tests.support.server.server_process import stop_server

WORDS = "What is it?"
PNG, JPEG = encoded(noise(96, 64)), encoded(noise(64, 128), "JPEG")
PNG_TEXT, JPEG_TEXT = (base64.b64encode(data).decode() for data in (PNG, JPEG))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingServer]:
    seeing = SeeingServer(tmp_path_factory.mktemp("seeing"))
    yield seeing
    stop_server(seeing.server)


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


QUESTION: list[Any] = [
    {
        "role": "user",
        "content": [
            image_url(data_url(PNG)),
            image_url(data_url(JPEG, "image/jpeg")),
            {"type": "text", "text": WORDS},
        ],
    }
]


@pytest.fixture(scope="module")
def expected(seeing: SeeingServer) -> tuple[str, int]:
    """OpenAI's client: the answer, and the tokens of the prompt."""
    answer = seeing.server.client().chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=STEPS, temperature=0
    )
    text, usage = answer.choices[0].message.content, answer.usage
    assert text and usage is not None and usage.prompt_tokens > 6 + 8
    return text, usage.prompt_tokens


def test_openai_responses(seeing: SeeingServer, expected: tuple[str, int]) -> None:
    urls = data_url(PNG), data_url(JPEG, "image/jpeg")
    images = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    content: Any = [*images, {"type": "input_text", "text": WORDS}]
    answer = seeing.server.client().responses.create(
        model=MODEL,
        input=[{"role": "user", "content": content}],
        max_output_tokens=STEPS,
        temperature=0,
    )
    assert answer.usage is not None
    assert (answer.output_text, answer.usage.input_tokens) == expected


def anthropic_image(data: str, media_type: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic(seeing: SeeingServer, expected: tuple[str, int], streamed: bool) -> None:
    images = [anthropic_image(PNG_TEXT, "image/png"), anthropic_image(JPEG_TEXT, "image/jpeg")]
    content: Any = [*images, {"type": "text", "text": WORDS}]
    ask: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": STEPS,
        "messages": [{"role": "user", "content": content}],
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=seeing.server.url, api_key="none", max_retries=0) as client:
        if streamed:
            with client.messages.stream(**ask) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**ask)
        counted = client.messages.count_tokens(model=MODEL, messages=ask["messages"])
    usage = message.usage
    found = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (message.content[0].text, found) == expected
    assert counted.input_tokens == expected[1]


def test_anthropic_says_which_image_is_wrong(seeing: SeeingServer) -> None:
    content: Any = [anthropic_image(JPEG_TEXT, "image/png"), {"type": "text", "text": WORDS}]
    with (
        anthropic.Anthropic(base_url=seeing.server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match=r"content\[0\]\.source.*image/jpeg"),
    ):
        client.messages.create(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": content}]
        )


def test_litellm(seeing: SeeingServer, expected: tuple[str, int]) -> None:
    litellm = pytest.importorskip("litellm")
    ask: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{seeing.server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": STEPS,
        "num_retries": 0,
        "messages": QUESTION,
    }
    answer = litellm.completion(**ask)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected
    chunks = list(litellm.completion(stream=True, **ask))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[0]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("form", ["image_url", "image"])
def test_langchain(
    seeing: SeeingServer, expected: tuple[str, int], responses: bool, form: str
) -> None:
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatOpenAI(
        model=MODEL,
        base_url=f"{seeing.server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=STEPS,
        max_retries=0,
        use_responses_api=responses,
    )
    content = QUESTION[0]["content"]
    if form == "image":  # its own form for all providers
        content = [
            {"type": "image", "base64": PNG_TEXT, "mime_type": "image/png"},
            {"type": "image", "base64": JPEG_TEXT, "mime_type": "image/jpeg"},
            {"type": "text", "text": WORDS},
        ]
    question = [messages.HumanMessage(content=content)]
    answer = model.invoke(question)
    assert (answer.text, answer.usage_metadata["input_tokens"]) == expected
    assert "".join(chunk.text for chunk in model.stream(question)) == expected[0]
