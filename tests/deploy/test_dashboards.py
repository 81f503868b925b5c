"""Every expression of the dashboards, of their variables and of the recording rules returns data.

A real Prometheus (Debian's package `prometheus`) scrapes a real server under load.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from tests.support.server.server_process import Server, free_port, start_server, stop_server

DEPLOY = Path(__file__).parents[2] / "deploy"
LOAD_SECONDS = 12
CHOSEN = {"$__rate_interval": "10s", "$__range": "30s"}

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not on the PATH: apt-get install prometheus",
    ),
]


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: Any) -> Any:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=query, timeout=10)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def numbers(self, expression: str) -> list[float]:
        """What the expression returned while there was load."""
        now = time.time()
        data = self.get("query_range", query=expression, start=now - 15, end=now, step=1)
        return [float(value) for series in data["result"] for _, value in series["values"]]


def boards() -> dict[str, dict[str, Any]]:
    files = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def expressions() -> Iterator[tuple[str, str]]:
    for name, board in boards().items():
        chosen = CHOSEN | {
            f"${variable['name']}": variable["current"]["value"]
            if variable["type"] == "custom"
            else variable.get("allValue", "")
            for variable in board["templating"]["list"]
        }
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                text: str = target["expr"]
                for variable in sorted(chosen, key=len, reverse=True):
                    text = text.replace(variable, chosen[variable])
                assert "$" not in text, text
                yield f"{name}: {panel['title']} {target['refId']}", text
    for group in yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                yield rule["record"], rule["record"]


def ask(server: Server, stop: threading.Event) -> None:
    """Requests of every kind, one after the other."""
    chat = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}]}
    text = {"model": "tiny-chat", "prompt": "Once upon a time", "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while not stop.is_set():
            client.post("/v1/chat/completions", json=chat)
            client.post("/v1/completions", json=text | {"max_tokens": 20, "stream": True, "n": 2})
            client.post("/v1/completions", json=text | {"model": "none"})
            client.post("/v1/embeddings", json={"model": "tiny-chat", "input": "fox"})
            with suppress(httpx.ReadTimeout):
                client.post("/v1/completions", json=text | {"max_tokens": 1000}, timeout=0.2)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has scraped a server under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    server = start_server(folder / "server.log")
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "rules.yml")],
        "scrape_configs": [
            {
                "job_name": "wavefill",
                "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    stop = threading.Event()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask, server, stop) for _ in range(3)]
            try:
                time.sleep(LOAD_SECONDS)
                yield Prometheus(f"http://127.0.0.1:{port}")
            finally:
                stop.set()
        for each in asked:
            each.result()
    finally:
        process.terminate()
        process.wait(20)
        stop_server(server)


def test_every_expression_returns_numbers(prometheus: Prometheus) -> None:
    found = list(expressions())
    assert len(found) > 80
    empty = []
    for name, expression in found:
        numbers = [n for n in prometheus.numbers(expression) if math.isfinite(n)]
        if not numbers or min(numbers) < 0:
            empty.append((name, expression))
    assert empty == []


def test_every_variable_has_values(prometheus: Prometheus) -> None:
    for board in boards().values():
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            query = variable["query"]["query"].replace("$job", ".*")
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
            assert found, query
            series, label = found.groups()
            assert prometheus.get(f"label/{label}/values", **{"match[]": series}), query


def test_ratios_are_ratios_and_objectives_are_buckets(prometheus: Prometheus) -> None:
    """An objective that is no bound of a bucket would select nothing."""
    for name, expression in expressions():
        if '_bucket{job=~".*"' in expression and 'le="' in expression:
            numbers = [n for n in prometheus.numbers(expression) if math.isfinite(n)]
            assert numbers and all(0 <= n <= 1 for n in numbers), (name, numbers)
    for histogram, name in (
        ("time_to_first_token", "slo_ttft"),
        ("inter_token_latency", "slo_itl"),
    ):
        series = f"wavefill_{histogram}_seconds_bucket"
        bounds = set(prometheus.get("label/le/values", **{"match[]": series}))
        variables = boards()["latency"]["templating"]["list"]
        (objective,) = (each for each in variables if each["name"] == name)
        assert {option["value"] for option in objective["options"]} <= bounds


def test_each_process_of_a_server_has_its_own_series(prometheus: Prometheus) -> None:
    query = {"match[]": "process_resident_memory_bytes"}
    assert set(prometheus.get("label/process/values", **query)) >= {"api", "engine", "launcher"}


def test_a_server_under_load_fires_no_alert(prometheus: Prometheus) -> None:
    assert prometheus.get("alerts")["alerts"] == []
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
