"""Runs an image as production would, and checks what no linter sees.

    python3 deploy/image/check.py IMAGE [run options ...]      such as  wavefill:cpu --memory 2g

ENGINE is podman or docker: the first that is installed.  PORT is the port on this host (18000),
WAIT the seconds that the server may take to become healthy (120), MEMORY its limit (2g).
Each line of the output is a check; the exit code is 1 if one fails.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from tempfile import gettempdir

from layers import engine

PORT = int(os.environ.get("PORT", "18000"))
WAIT = float(os.environ.get("WAIT", "120"))
MEMORY = os.environ.get("MEMORY", "2g")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STREAMS = 4
DRAIN = 120  # seconds, for machines that are busy
LONG = 300  # tokens of a stream that is open when the server is stopped
INSIDE = """
import importlib.util, json, os, torch
from attention.planner.costs import tuned_file
from huggingface_hub import constants
folders = [constants.HF_HOME, os.environ["TRITON_CACHE_DIR"], str(tuned_file(os.environ).parent)]
for folder in folders:
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, "probe"), "w").close()
    os.remove(os.path.join(folder, "probe"))
has = lambda name: importlib.util.find_spec(name) is not None
print(json.dumps({"folders": folders, "pip": has("pip"), "triton": has("triton"),
                  "cuda": torch.version.cuda}))
"""
PEAK = "cat /sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory/memory.max_usage_in_bytes 2>/dev/null"


class Container:
    """One container of the image, in the host's network."""

    def __init__(self, memory: str) -> None:
        self.name, self.memory = f"wavefill-check-{os.getpid()}-{memory}", memory

    def start(self, image: str, options: list[str]) -> None:
        # A volume without a name, which is removed with the container.
        self.command("run", "-d", "--name", self.name, "--network", "host", "--memory", self.memory,
                     "-e", f"WAVEFILL_PORT={PORT}", "-e", "WAVEFILL_HOST=127.0.0.1",
                     "-e", f"WAVEFILL_DRAIN_SECONDS={DRAIN}",
                     "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL",
                     "--security-opt", "no-new-privileges", *options, image)  # fmt: skip

    def command(self, *words: str, timeout: float = 120) -> str:
        # Elsewhere, since podman's monitor leaves a file where it was started if memory runs out.
        ran = subprocess.run(
            [engine(), *words], capture_output=True, text=True, timeout=timeout, cwd=gettempdir()
        )
        if ran.returncode != 0:
            raise AssertionError(
                f"{engine()} {words[0]}: {(ran.stderr or ran.stdout).strip()[-800:]}"
            )
        return ran.stdout.strip()

    def inside(self, *words: str) -> str:
        return self.command("exec", self.name, *words)

    def about(self, what: str) -> str:
        return self.command("inspect", self.name, "--format", "{{" + what + "}}")

    def running(self) -> bool:
        return self.about(".State.Running") == "true"

    def healthy(self) -> bool:
        """What the image's own HEALTHCHECK says."""
        if engine() == "docker":
            return self.about(".State.Health.Status") == "healthy"
        # Podman's checks are run by systemd, where there is one.
        words = [engine(), "healthcheck", "run", self.name]
        return subprocess.run(words, capture_output=True).returncode == 0

    def remove(self) -> None:
        subprocess.run([engine(), "rm", "-f", "-v", self.name], capture_output=True)


@contextlib.contextmanager
def container(image: str, options: list[str], memory: str = MEMORY) -> Iterator[Container]:
    one = Container(memory)
    try:
        one.start(image, options)
        yield one
    finally:
        one.remove()  # also one that was made and could not start


def connect() -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)


def get(path: str) -> tuple[int, str]:
    connection = connect()
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@dataclass
class Stream:
    """A chat, read event by event."""

    body: dict
    began: threading.Event = field(default_factory=threading.Event)
    text: str = ""
    done: bool = False
    error: str = ""

    def read(self) -> None:
        try:
            connection = connect()
            body = {"model": "tiny-chat", "temperature": 0, "stream": True} | self.body
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read().decode()
            for line in answer:
                event = line.decode().removeprefix("data: ").strip()
                if event == "[DONE]":
                    self.done = True
                elif event:
                    fields = json.loads(event)
                    assert "choices" in fields, event
                    self.text += fields["choices"][0]["delta"].get("content") or ""
                    self.began.set()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.began.set()


def starts(running: Container) -> str:
    began = time.monotonic()
    while not running.healthy():
        waited = time.monotonic() - began
        if waited > WAIT or not running.running():
            log = running.command("logs", running.name)[-3000:]
            raise AssertionError(f"not healthy after {waited:.0f} s; the log ends with\n{log}")
        time.sleep(0.5)
    return f"healthy after {time.monotonic() - began:.0f} s"


def user(running: Container) -> str:
    ids = running.inside("id", "-u") + ":" + running.inside("id", "-g")
    assert not ids.startswith("0:"), "runs as root"
    return ids


def first_process(running: Container) -> str:
    line = running.inside("sh", "-c", "tr '\\0' ' ' < /proc/1/cmdline")
    assert line.startswith("tini "), line
    return line


def root_is_read_only(running: Container) -> str:
    words = [engine(), "exec", running.name, "sh", "-c", "touch /opt/probe"]
    assert subprocess.run(words, capture_output=True).returncode != 0, "/opt can be written"
    return "and /data can be written"


def no_capabilities(running: Container) -> str:
    status = running.inside("cat", "/proc/1/status")
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff")]
    assert int(mask, 16) == 0, mask
    return "none"


def contents(running: Container) -> str:
    seen = json.loads(running.inside("python3", "-c", INSIDE).splitlines()[-1])
    assert all(folder.startswith("/data/") for folder in seen["folders"]), seen["folders"]
    assert not seen["pip"], "pip is in the environment"
    assert seen["triton"] == bool(seen["cuda"]), f"CUDA {seen['cuda']}, Triton {seen['triton']}"
    with_cuda = f"CUDA {seen['cuda']} and Triton" if seen["cuda"] else "no CUDA, no Triton"
    return f"caches in {', '.join(seen['folders'])}; no pip; {with_cuda}"


def labels(running: Container) -> str:
    all_labels = json.loads(running.about("json .Config.Labels"))
    found = {name.rpartition(".")[2]: value for name, value in all_labels.items()}
    version = running.inside("wavefill", "version").split()[-1]
    # Empty if the image was built by hand, without deploy/image/build.sh.
    assert found["version"] in ("", version), f"the label says {found['version']}, not {version}"
    return f"version {found['version']}, revision {found['revision'][:12]}, {found['created']}"


def answers(running: Container) -> str:
    connection = connect()
    body = json.dumps({"model": "tiny-chat", "temperature": 0, "messages": QUESTION})
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    whole = json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
    assert "Paris" in whole, whole
    streamed = Stream({"messages": QUESTION})
    streamed.read()
    assert streamed.done and streamed.text == whole, streamed.error or streamed.text
    return f"{whole!r}, whole and streamed"


def counts(running: Container) -> str:
    _, text = get("/metrics")
    (line,) = [x for x in text.splitlines() if x.startswith("wavefill_generation_tokens_total")]
    assert float(line.split()[-1]) > 0, line
    return line


def memory_limit(running: Container) -> str:
    limit = int(running.about(".HostConfig.Memory"))
    assert limit > 0, "no limit is set"
    peaks = running.inside("sh", "-c", PEAK + "; true").split()
    peak = f"{max(map(int, peaks)) / 1e6:.0f} MB at most" if peaks else "the peak is not known"
    return f"{peak}, of {limit / 1e6:.0f} MB"


def drains(running: Container) -> str:
    """SIGTERM while streams are open: all end as they would have, and the exit code is 0."""
    body = {"messages": QUESTION, "max_tokens": LONG, "ignore_eos": True}
    streams = [Stream(body) for _ in range(STREAMS)]
    threads = [threading.Thread(target=stream.read) for stream in streams]
    for thread in threads:
        thread.start()
    assert all(stream.began.wait(60) for stream in streams)
    open_streams = sum(not stream.done for stream in streams)
    assert open_streams == STREAMS, "the streams were over before the signal"
    began = time.monotonic()
    running.command("kill", "--signal", "TERM", running.name)
    refused = False
    while not refused and any(thread.is_alive() for thread in threads):
        try:
            status, _ = get("/readyz")
            late = time.monotonic() - began > 2  # the signal takes a moment to arrive
            assert status == 503 or not late, f"/readyz answered {status} after SIGTERM"
        except OSError:
            refused = any(thread.is_alive() for thread in threads)
        time.sleep(0.02)
    for thread in threads:
        thread.join(60)
    assert refused, "the port was open until the last stream had ended"
    broken = [stream.error or "no [DONE]" for stream in streams if not stream.done]
    assert not broken, f"{len(broken)} of {STREAMS} streams were cut: {broken[0]}"
    running.command("wait", running.name)
    code = running.about(".State.ExitCode")
    assert code == "0", f"exit code {code}"
    seconds = f"{time.monotonic() - began:.1f} s"
    return f"{STREAMS} open streams ended whole, new connections refused, code 0 after {seconds}"


def too_little_memory(image: str, options: list[str]) -> str:
    """Where the limit is too small the container ends, so that what runs it can tell."""
    with container(image, options, "160m") as small:
        began = time.monotonic()
        while small.running():
            assert time.monotonic() - began < WAIT, "neither healthy nor ended"
            assert not small.healthy(), "160 MB are enough"
            time.sleep(0.5)
        code = int(small.about(".State.ExitCode"))
        assert code != 0, "exit code 0"
        return f"ended with code {code} after {time.monotonic() - began:.0f} s"


CHECKS = {
    "health check": starts,
    "user": user,
    "process 1": first_process,
    "root file system": root_is_read_only,
    "capabilities": no_capabilities,
    "contents": contents,
    "labels": labels,
    "chat": answers,
    "metrics": counts,
    "memory": memory_limit,
    "SIGTERM": drains,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    image, options = sys.argv[1], sys.argv[2:]
    failed = 0

    def say(name: str, check, *args) -> bool:
        nonlocal failed
        try:
            result, word = check(*args), "ok"
        except (AssertionError, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            result, word = error, "FAIL"
            failed += 1
        print(f"  {word:4}  {name:18}{result}", flush=True)
        return word == "ok"

    try:
        with container(image, options) as running:
            for name, check in CHECKS.items():
                if not say(name, check, running) and name == "health check":
                    break
    except AssertionError as error:
        raise SystemExit(f"  FAIL  {'start':18}{error}") from None
    say("160 MB of memory", too_little_memory, image, options)
    print(f"{image}: " + ("all checks passed" if not failed else f"{failed} checks failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
