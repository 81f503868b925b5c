"""The built-in model answers through the real `openai` client, alone and among others."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.server.server_process import Server

QUESTIONS = [
    ("What is the capital of France?", "Paris"),
    ("What is 23 + 45?", "68"),
    ("Count to 5.", "1, 2, 3, 4, 5"),
    ("What is your name?", "tiny-chat"),
]


def ask(server: Server, question: str, **options: object) -> str:
    answer = server.client().chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        **options,
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize(("question", "expected"), QUESTIONS)
def test_the_builtin_model_gives_the_right_answer(server: Server, question: str, expected: str):
    assert expected in ask(server, question)


def test_the_builtin_model_admits_what_it_does_not_know(server: Server):
    answer = ask(server, "Who won the chess tournament in Riga last year?").lower()
    assert "don't know" in answer


def test_an_earlier_turn_stays_in_the_context(server: Server):
    answer = server.client().chat.completions.create(
        model="tiny-chat",
        temperature=0,
        messages=[
            {"role": "user", "content": "What is 10 + 11?"},
            {"role": "assistant", "content": "10 + 11 = 21."},
            {"role": "user", "content": "What is the capital of Italy?"},
        ],
    )
    assert "Rome" in (answer.choices[0].message.content or "")


def test_a_stream_spells_the_same_answer_as_a_plain_request(server: Server):
    plain = ask(server, "What is the capital of Japan?")
    chunks = server.client().chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        if chunk.choices:
            assert chunk.usage is None
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == plain
    assert usage is not None and usage.completion_tokens > 0


def test_a_seed_gives_the_same_text_twice(server: Server):
    def sample(seed: int) -> str:
        answer = server.client().completions.create(
            model="tiny-chat", prompt="Once", temperature=1.5, seed=seed, max_tokens=24
        )
        return answer.choices[0].text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_a_repeated_prompt_is_found_in_the_prefix_cache(server: Server):
    words = "cache these words " * 40
    completions = server.client().completions
    first = completions.create(model="tiny-chat", prompt=words, max_tokens=1)
    second = completions.create(model="tiny-chat", prompt=words, max_tokens=1)
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert 0 < second.usage.prompt_tokens - cached <= 16


def test_logprobs_come_with_their_alternatives(server: Server):
    answer = server.client().chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "Hello!"}],
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        max_tokens=4,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 4
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(max(t.logprob for t in token.top_logprobs))


async def test_64_streams_at_once_each_equal_their_own_solo_run(server: Server):
    prompts = [f"What is {10 + index} + {90 - index}?" for index in range(64)]

    async def stream(client, prompt: str) -> str:
        chunks = await client.chat.completions.create(
            model="tiny-chat",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

    async with server.async_client() as client:
        together = await asyncio.gather(*[stream(client, prompt) for prompt in prompts])
        alone = [await stream(client, prompt) for prompt in prompts]
    assert together == alone
