"""Parameters whose effect only the real engine can show."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx

from tests.support.server.server_process import Server


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny-chat", "prompt": "Once upon", "temperature": 0, "max_tokens": 12}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_answer_has_no_tokens_but_the_allowed(server: Server):
    answer = complete(server, allowed_token_ids=[40, 41, 42], temperature=1, return_token_ids=True)
    assert set(answer["choices"][0]["token_ids"]) <= {40, 41, 42}
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_banned_word_is_not_said_and_nothing_before_it_changes(server: Server):
    def ask(**fields: Any) -> str:
        body = {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 24,
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    before, word, _ = ask().partition("Paris")
    assert word
    banned = ask(bad_words=["Paris"])
    assert "Paris" not in banned
    assert banned.startswith(before.rstrip())
    assert "capital of France" not in ask(bad_words=["capital of"])


def test_timings_report_preemptions_and_batch_size(server: Server):
    answer = complete(server, timings=True, n=3, max_tokens=20, ignore_eos=True)
    for choice in answer["choices"]:
        timings = choice["timings"]
        assert timings["preemptions"] == 0
        assert 1 <= timings["mean_batch_size"] <= 64
        assert timings["completion_tokens"] == 20
        assert 0 < timings["decode_seconds"] < timings["total_seconds"]
    record = httpx.get(f"{server.url}/v1/requests/{answer['id']}").json()
    assert record["state"] == "finished"
    assert [choice["mean_batch_size"] for choice in record["choices"]] == [
        choice["timings"]["mean_batch_size"] for choice in answer["choices"]
    ]


def test_the_best_of_several_is_the_likeliest(server: Server):
    fields = {"temperature": 1.5, "seed": 3, "logprobs": 0, "ignore_eos": True}
    every = complete(server, n=4, **fields)["choices"]
    [best] = complete(server, best_of=4, **fields)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)

    assert best["text"] == max(every, key=mean)["text"]
