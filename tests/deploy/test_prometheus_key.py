"""Prometheus with deploy/prometheus.yml scrapes servers with API keys and without."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import httpx2 as httpx
import pytest
import yaml

from tests.support.server.fake_engine import fake_server
from tests.support.server.server_process import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"


def value_of_up(folder: Path, target: str, key: Path) -> str:
    """What Prometheus says of its only target, once it has asked it."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "200ms"}
    config["rule_files"] = []
    (job,) = config["scrape_configs"]
    job["static_configs"][0]["targets"] = [target]
    job["authorization"]["credentials_file"] = str(key)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    query = {"query": 'up{job="wavefill"}'}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(300):
            time.sleep(0.1)
            try:
                answer = httpx.get(f"http://{address}/api/v1/query", params=query).json()
            except httpx.TransportError:
                continue
            if found := answer.get("data", {}).get("result"):
                return found[0]["value"][1]
        raise AssertionError((folder / "log").read_text())
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not on the PATH: apt-get install prometheus",
)
@pytest.mark.parametrize(
    ("keys", "written", "up"),
    [
        ((), None, "1"),
        (("alice sk-one", "prometheus sk-two"), "sk-two\n", "1"),
        (("alice sk-one", "prometheus sk-two"), None, "0"),
    ],
    ids=["no keys", "its key", "keys, and none for it"],
)
def test_prometheus_scrapes_a_server_with_its_key_and_one_without_keys(
    tmp_path: Path, keys: tuple[str, ...], written: str | None, up: str
) -> None:
    key = DEPLOY / "no-key"
    if written is not None:
        key = tmp_path / "key"
        key.write_text(written)
    with fake_server(tmp_path, api_keys=keys) as server:
        assert value_of_up(tmp_path, server.url.removeprefix("http://"), key) == up
