"""A Ray cluster of several nodes in this machine with deploy/ray_serve.py on it, by commands.

    python -m benchmarks.server.ray_cluster PORT [OPTIONS]

OPTIONS is JSON: `node_gpus`, the GPUs that each node claims to have ([0, 0]), and what class
`Options` of deploy/ray_serve.py has.

A line on stdin is a command, and its answer a line of JSON on stdout:

    servers     for each node but the head: the port of the server on it
    kill PORT   SIGKILL to all processes of the node that has the server on PORT
    drain PORT  Ray's drain of that node, once there is another one; the node is removed when empty
    add [GPUS]  another node
    ready       wait until as many servers are ready as there are nodes with GPUs enough
    scale N M   let Ray run N to M servers, by the requests that are open

A file of its own, run as a process, so that what uses it needs no Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["WAVEFILL_THREADS"] = "1"
os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"
os.environ |= {"RAY_worker_niceness": "0"}  # 15 otherwise: a server would stand behind all else

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from benchmarks.server.replica_fleets import get

DEPLOY = Path(__file__).parents[2] / "deploy"
sys.path.insert(0, str(DEPLOY))
WAIT_SECONDS = 300.0


class Nodes:
    """The nodes of the cluster that run servers."""

    def __init__(self, port: int, node_gpus: list[int], **options: Any) -> None:
        """node_gpus: how many each node claims to have; `options` are those of ray_serve.py"""
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        self.gpus: dict[str, int] = {}  # by the node's id
        for num_gpus in node_gpus:
            self.add(num_gpus)
        ray.init(
            address=self.cluster.address,
            log_to_driver=False,
            runtime_env={"working_dir": str(DEPLOY)},
        )
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        self.options = options
        self.scale(self.room(), self.room())

    def room(self) -> int:
        """The nodes with as many GPUs as a server has."""
        wanted = self.options.get("num_gpus", 0)
        return sum(self.gpus[node.node_id] >= wanted for node in self.nodes)

    def scale(self, least: int, most: int) -> None:
        """Two requests a server are as many as it should have; Ray acts within seconds."""
        import ray_serve

        chosen = ray_serve.Options(
            options="--device cpu",
            min_replicas=least,
            max_replicas=most,
            target_ongoing_requests=2,
            upscale_delay_s=1,
            downscale_delay_s=3,
            **self.options,
        )
        serve.run(ray_serve.app(chosen), route_prefix="/")

    def processes(self, node: Any) -> list[psutil.Process]:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def port_of(self, node: Any) -> int | None:
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "serve" in words and "--port" in words:
                    return int(words[words.index("--port") + 1])
        return None

    def servers(self) -> list[int]:
        ports = [self.port_of(node) for node in self.nodes]
        return [port for port in ports if port is not None]

    def node_of(self, port: int) -> Any:
        return next(node for node in self.nodes if self.port_of(node) == port)

    def kill(self, port: int) -> None:
        node = self.node_of(port)
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, port: int) -> None:
        node = self.node_of(port)
        self.add(self.gpus[node.node_id])
        command = [Path(sys.executable).parent / "ray", "drain-node", "--node-id", node.node_id]
        command += ["--address", self.cluster.address, "--deadline-remaining-seconds", "240"]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: self.port_of(node) is None)
        self.nodes.remove(node)
        self.cluster.remove_node(node)

    def add(self, num_gpus: int = 0) -> None:
        node = self.cluster.add_node(num_cpus=1, num_gpus=num_gpus)
        self.nodes.append(node)
        self.gpus[node.node_id] = num_gpus

    def all_ready(self) -> bool:
        ports = self.servers()
        ready = len(ports) == self.room() and all(get(p, "/readyz")[0] == 200 for p in ports)
        replicas = serve.status().applications["default"].deployments["Replica"].replica_states
        return ready and {str(state): n for state, n in replicas.items()} == {
            "RUNNING": self.room()
        }


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS} s"
        time.sleep(0.1)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    nodes = Nodes(int(sys.argv[1]), **{"node_gpus": [0, 0], **options})
    wait_until(nodes.all_ready)

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer(nodes.servers())
    for line in sys.stdin:
        match line.split():
            case ["kill", port]:
                nodes.kill(int(port))
            case ["drain", port]:
                nodes.drain(int(port))
            case ["add"]:
                nodes.add()
            case ["add", gpus]:
                nodes.add(int(gpus))
            case ["scale", least, most]:
                nodes.scale(int(least), int(most))
            case ["ready"]:
                wait_until(nodes.all_ready)
        answer(nodes.servers())
    serve.shutdown()
    ray.shutdown()
    nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
