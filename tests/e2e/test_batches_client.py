"""Batches through the whole server: OpenAI's client, the built-in model, an end in the middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.server.server_process import Server


def lines(count: int, **fields: Any) -> bytes:
    content = ""
    for index in range(count):
        messages = [{"role": "user", "content": f"What is {index} plus 2?"}]
        body = {"model": "tiny-chat", "messages": messages, "temperature": 0} | fields
        whole = {"custom_id": f"q{index}", "method": "POST", "url": "/v1/chat/completions"}
        content += json.dumps(whole | {"body": body}) + "\n"
    return content.encode()


def begin(client: OpenAI, content: bytes) -> str:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return made.id


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_batch_survives_the_end_of_its_server(
    own_server: Callable[..., Server], tmp_path: Path, end: signal.Signals
):
    # Two API processes: one runs batches, both answer about them.
    options = ("--data-dir", str(tmp_path / "data"), "--api-workers", "2")
    server = own_server(*options, "--batch-concurrency", "2")
    client = server.client()
    id = begin(client, lines(20, max_tokens=60, ignore_eos=True))
    server.wait_until(lambda: client.batches.retrieve(id).request_counts.completed > 0)
    if end == signal.SIGKILL:
        os.killpg(server.process.pid, end)
        server.process.wait(10)
    else:
        server.process.send_signal(end)
        assert server.process.wait(20) == 0

    server = own_server(*options)
    client = server.client()
    server.wait_until(lambda: client.batches.retrieve(id).status == "completed", 60)
    batch = client.batches.retrieve(id)
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    records = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert sorted(record["custom_id"] for record in records) == sorted(f"q{n}" for n in range(20))
    assert batch.usage.output_tokens == 20 * 60
    for record in records:
        assert record["response"]["body"]["choices"][0]["finish_reason"] == "length"
