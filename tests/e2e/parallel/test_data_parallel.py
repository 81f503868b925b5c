"""Two engines with the built-in model behind one address, on a CPU, as callers see them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx2 as httpx
import openai
import psutil
import pytest

from tests.support.server.server_process import Server, start_server, stop_server

pytestmark = pytest.mark.slow
MODEL = "tiny-chat"
ENGINE = "runtime.engine.process"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("data-parallel")
    options = ("-dp", "2", "--max-num-seqs", "8", "--data-dir", str(folder / "data"))
    server = start_server(folder / "log", MODEL, *options)
    server.wait_until(lambda: ready(server) == {"status": "ok"})
    yield server
    stop_server(server)


def ready(server: Server) -> dict[str, object]:
    return httpx.get(f"{server.url}/readyz", timeout=5).json()


def by_engine(server: Server, name: str) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    begin = f'{name}{{engine="'
    found = [line.removeprefix(begin) for line in lines if line.startswith(begin)]
    return {line[0]: float(line.rsplit(" ", 1)[1]) for line in found}


def engines_of(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if ENGINE in child.cmdline()]


async def complete(client: openai.AsyncOpenAI, prompt: str, max_tokens: int = 8) -> int:
    """Cached tokens of the prompt."""
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


async def test_both_engines_work_and_the_sums_are_those_of_one_server(server: Server):
    before = by_engine(server, "wavefill_generation_tokens_total")
    async with server.async_client() as client:
        prompts = [f"Story number {number}: once upon a time" for number in range(16)]
        await asyncio.gather(*(complete(client, prompt, 24) for prompt in prompts))
    after = by_engine(server, "wavefill_generation_tokens_total")
    gained = {engine: after[engine] - before[engine] for engine in after}
    assert set(gained) == {"0", "1"} and min(gained.values()) >= 0.25 * sum(gained.values())
    assert server.metric("vllm:generation_tokens_total") == sum(after.values())


def test_choices_of_one_request_are_made_by_both_engines(server: Server):
    before = by_engine(server, "wavefill_generation_tokens_total")
    answer = server.client().completions.create(model=MODEL, prompt="Once", n=8, max_tokens=24)
    after = by_engine(server, "wavefill_generation_tokens_total")
    assert all(after[engine] > before[engine] for engine in ("0", "1"))
    assert [choice.index for choice in answer.choices] == list(range(8))


async def test_prompts_with_the_same_beginning_go_to_the_engine_that_has_it(server: Server):
    beginnings = [f"Chapter {name}. " + f"It was about {name} and more. " * 12 for name in "ABCD"]
    async with server.async_client() as client:
        for beginning in beginnings:
            await complete(client, beginning + "First question?")
        await asyncio.sleep(0.3)  # each engine reports what it has cached
        before = by_engine(server, "wavefill_prompt_tokens_total")
        computed = 0
        for number in range(5):
            for beginning in beginnings:
                await asyncio.sleep(0.1)  # a report that the last answer has ended may be late
                computed += await complete(client, beginning + f"Question {number}?") <= 60
        # Where chance decided, nearly every beginning would be computed by the other engine once.
        assert computed <= 1
        after = by_engine(server, "wavefill_prompt_tokens_total")
    # Four beginnings of equal length were spread over two idle engines.
    assert all(after[engine] > before[engine] for engine in ("0", "1"))


async def test_a_killed_engine_takes_what_it_had_begun_and_no_other_answer(server: Server):
    async with server.async_client() as client:

        async def stream() -> str:
            """How it ended."""
            try:
                events = await client.completions.create(
                    model=MODEL, prompt="Once", max_tokens=400, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                count = 0
                async for event in events:
                    count += 1
                    if count == 3:
                        begun.append(event)
                return "complete"
            except openai.APIError as error:
                return str(error)

        begun: list[object] = []
        streams = [asyncio.create_task(stream()) for _ in range(6)]
        while len(begun) < 6:
            await asyncio.sleep(0.01)
        victim = engines_of(server)[0]
        # More than fit beside the streams: some wait in each engine.
        waiting = [asyncio.create_task(complete(client, f"Number {n}", 40)) for n in range(24)]
        await asyncio.sleep(0.05)
        victim.kill()
        ends = await asyncio.gather(*streams)
        failed = [end for end in ends if end != "complete"]
        assert len(failed) == 3 and all("SIGKILL" in end for end in failed)
        assert ready(server).get("status") in ("degraded", "ok")
        answers = await asyncio.gather(*waiting)
        assert len(answers) == 24
    server.wait_until(lambda: ready(server) == {"status": "ok"})
    assert sum(by_engine(server, "wavefill_engine_restarts_total").values()) == 1
    # The one that came back gets work again.
    async with server.async_client() as client:
        before = by_engine(server, "wavefill_generation_tokens_total")
        await asyncio.gather(*(complete(client, f"Again {n}", 16) for n in range(8)))
        after = by_engine(server, "wavefill_generation_tokens_total")
    assert all(after[engine] > before[engine] for engine in ("0", "1"))


def test_stored_responses_and_batches_do_not_know_of_engines(server: Server):
    client = server.client()
    first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=8)
    for _ in range(3):
        following = client.responses.create(
            model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=8
        )
        assert following.previous_response_id == first.id
    line = (
        '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", '
        '"body": {"model": "tiny-chat", "prompt": "Hello %d", "max_tokens": 4}}'
    )
    text = "\n".join(line % (number, number) for number in range(12))
    file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    server.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 40)
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None and (counts.completed, counts.failed) == (12, 0)


def test_the_log_says_what_runs_and_one_request_is_found_whatever_engine_had_it(server: Server):
    log = server.log.read_text()
    for engine in (0, 1):
        assert f"engine {engine} of 2 ready in" in log
    client = server.client()
    answer = client.completions.with_raw_response.create(model=MODEL, prompt="Hi", max_tokens=4)
    found = httpx.get(f"{server.url}/v1/requests/{answer.headers['x-request-id']}").json()
    assert found["choices"], found
