"""deploy/ray_serve.py with a model that GPUs share: nodes that claim GPUs, and ranks on the CPU."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.server.ray_fleet import RayFleet, ray_cluster
from tests.support.paths import ROOT

# The start of a cluster and of a server, on two cores that do other things too.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fleet(ray_package: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    """Nodes with one, one and two GPUs, and a server that needs two."""
    folder = tmp_path_factory.mktemp("ray")
    with ray_cluster(folder, node_gpus=[1, 1, 2], num_gpus=2, tensor_parallel=2) as fleet:
        yield fleet


def server_on(port: int) -> psutil.Process:
    """The process of `wavefill serve` that has this port."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "serve" in words and words[-1:] != ["serve"] and str(port) in words:
            return process
    raise AssertionError(f"no server has port {port}")


def ranks(server: psutil.Process) -> int:
    """Processes that share the model with the engine process."""
    below = server.children(recursive=True)
    return sum("runtime.engine.rank_process" in each.cmdline() for each in below)


def complete(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "tiny-chat", "temperature": 0, "messages": messages}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    with connection.getresponse() as answer:
        fields = json.load(answer)
    connection.close()
    return fields["choices"][0]["message"]["content"]


def test_a_replica_has_all_its_gpus_on_one_node_and_a_rank_for_each(fleet: RayFleet):
    (port,) = fleet.command("servers")
    server = server_on(port)
    assert len(server.environ()["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    words = server.cmdline()
    assert words[words.index("--tensor-parallel") + 1] == "2" and "--data-parallel" not in words
    assert ranks(server) == 1, "one beside the engine process"
    assert "Paris" in complete(fleet.port)


def test_a_replica_whose_node_died_waits_for_a_node_with_gpus_enough(fleet: RayFleet):
    (port,) = fleet.command("servers")
    assert fleet.command(f"kill {port}") == [], "two nodes of one GPU each are not two GPUs"
    (other,) = [*fleet.command("add 2"), *fleet.command("ready")][-1:]
    assert ranks(server_on(other)) == 1
    assert "Paris" in complete(fleet.port)


CASES: list[tuple[dict[str, object], str]] = [
    ({}, ""),
    ({"num_gpus": 0.5}, ""),
    ({"num_gpus": 2}, "--data-parallel 2"),
    ({"tensor_parallel": 2}, "--tensor-parallel 2"),
    ({"num_gpus": 2, "tensor_parallel": 2}, "--tensor-parallel 2"),
    ({"num_gpus": 4, "tensor_parallel": 2}, "--tensor-parallel 2 --data-parallel 2"),
    ({"num_gpus": 1.5}, "are whole"),
    ({"num_gpus": 3, "tensor_parallel": 2}, "num_gpus=3 is no multiple of tensor_parallel=2"),
    ({"num_gpus": 0.5, "tensor_parallel": 2}, "num_gpus=0.5 is no multiple of"),
    ({"options": "--data-parallel-size=2"}, "set num_gpus and tensor_parallel instead"),
    ({"options": "-tp 2"}, "set num_gpus and tensor_parallel instead"),
]
CODE = """
import json, sys
import ray_serve
def said(fields):
    try:
        return " ".join(ray_serve.Options(**fields).arguments())
    except ValueError as error:
        return str(error)
print(json.dumps([said(fields) for fields in json.loads(sys.argv[1])]))
"""


def test_gpus_become_options_of_the_server_or_are_refused(ray_package: None):
    fields = json.dumps([given for given, _ in CASES])
    command = [sys.executable, "-c", CODE, fields]
    ran = subprocess.run(command, cwd=ROOT / "deploy", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for (given, expected), said in zip(CASES, json.loads(ran.stdout), strict=True):
        if expected.startswith("--") or not expected:
            assert said == f"--drain-seconds 30 {expected}".strip(), given
        else:
            assert expected in said, given
