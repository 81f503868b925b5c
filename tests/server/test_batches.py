"""Batches from their making to their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_server import BatchServer, batch_server, line


@pytest.fixture
async def server(tmp_path: Path):
    async with batch_server(tmp_path) as server:
        yield server


async def test_a_batch_answers_every_line_as_its_route_would(server: BatchServer):
    server.run_batches()
    made = await server.create("".join(line(f"a{index}") for index in range(5)))
    assert made["status"] == "validating"
    batch = await server.until(made["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    records = await server.records(batch["output_file_id"])
    assert {record["custom_id"] for record in records} == {f"a{index}" for index in range(5)}
    assert batch["error_file_id"] is None
