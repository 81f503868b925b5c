"""The built-in model answers Anthropic's own client and Ollama's."""

from __future__ import annotations

import anthropic
import ollama

from tests.support.server.server_process import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_anthropics_client_gets_an_answer_whole_and_as_a_stream(server: Server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked = {"model": "tiny-chat", "max_tokens": 64, "messages": QUESTION}
        message = client.messages.create(**asked, extra_body={"temperature": 0})
        assert "Paris" in message.content[0].text and message.stop_reason == "end_turn"
        with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            assert "".join(stream.text_stream) == message.content[0].text
            usage = stream.get_final_message().usage
        counted = client.messages.count_tokens(model="tiny-chat", messages=QUESTION).input_tokens
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted


def test_ollamas_client_gets_an_answer_and_its_durations(server: Server):
    with ollama.Client(server.url) as client:
        answer = client.chat("tiny-chat", QUESTION, options={"temperature": 0})
        assert "Paris" in (answer.message.content or "") and answer.done_reason == "stop"
        parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
        assert answer.total_duration
        assert 0 < sum(part or 0 for part in parts) <= answer.total_duration + 3
        lines = list(client.chat("tiny-chat", QUESTION, options={"temperature": 0}, stream=True))
        assert "".join(line.message.content or "" for line in lines) == answer.message.content
        assert client.list().models[0].model == "tiny-chat:latest"
