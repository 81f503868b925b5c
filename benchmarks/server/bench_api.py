"""CPU time of a streamed token in the API process, with a fake engine.

    python -m benchmarks.server.bench_api --streams 256 --tokens 200 --interval-ms 20

Three processes: the real API process with the built-in model's tokenizer, an engine that sends one
token to every stream in each step, and this one, which opens the streams and reads them.  Prints
the processor time of the API process (user and system) for each token that it delivered, and that
of `wavefill bench serve` for each token that it read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from urllib.request import urlopen

import msgspec

from runtime.ipc.channel import Receiver, Sender
from runtime.messages import (
    Abort,
    EngineRequest,
    FromEngine,
    Ready,
    RequestOutput,
    StepOutput,
    ToEngine,
)
from runtime.stats import Stats
from server.cli.model_source import built_in_directory
from server.config import ServerConfig


def fake_engine(own: str, client: str, interval: float) -> None:
    """One token for every open request in each step."""
    receiver = Receiver(own, msgspec.msgpack.Decoder(ToEngine))
    sender: Sender[FromEngine] = Sender(client)
    sender.send(
        Ready(1, "fake", "cpu", "float32", "none", 4096, 2048, 16, 1 << 20, 1024, 2048, 0, 0, 0.0)
    )
    left: dict[int, int] = {}
    steps = 0
    while True:
        began = time.monotonic()
        for message in receiver.receive(0 if left else 1.0):
            if isinstance(message, EngineRequest):
                left[message.id] = message.params.max_tokens
            elif isinstance(message, Abort):
                left.pop(message.id, None)
        ids, tokens = array("q"), array("i")
        outputs: list[RequestOutput] = []
        for place, (id, rest) in enumerate(list(left.items())):
            token = 1000 + (steps * 7 + place * 13) % 2000
            left[id] = rest - 1
            if rest == 1:
                outputs.append(RequestOutput(id, [token], "length"))
                del left[id]
            else:
                ids.append(id)
                tokens.append(token)
        if ids or outputs:
            steps += 1
            stats = Stats(running=len(left), steps=steps)
            sender.send(StepOutput(outputs, stats, ids.tobytes(), tokens.tobytes()))
            time.sleep(max(0.0, interval - (time.monotonic() - began)))


async def read_stream(port: int, tokens: int) -> int:
    """Open one stream and read it to its end; returns the number of its chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "max_tokens": tokens,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    data = await reader.read(-1)
    writer.close()
    assert b"data: [DONE]" in data, data[:500]
    return data.count(b'"delta":{"content"')


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


async def load(port: int, streams: int, tokens: int) -> int:
    return sum(await asyncio.gather(*[read_stream(port, tokens) for _ in range(streams)]))


def measure(pid: int, port: int, streams: int, tokens: int) -> tuple[list[float], int]:
    """User and system seconds of the API process for so many streams, and their chunks."""
    before = cpu_seconds(pid)
    chunks = asyncio.run(load(port, streams, tokens))
    return [x - y for x, y in zip(cpu_seconds(pid), before, strict=True)], chunks


def client_microseconds(port: int, streams: int, tokens: int, processes: int) -> float:
    """CPU time of `wavefill bench serve` per token, without its start and its requests."""
    spent: list[float] = []
    for length in (1, tokens):
        command = [sys.executable, "-m", "benchmarks.server.bench_serve", "--ignore-eos"]
        command += ["--base-url", f"http://127.0.0.1:{port}/v1", "--warmup", "0"]
        command += ["--concurrency", str(streams), "--num-prompts", str(streams)]
        command += ["--input-len", "16", "--output-len", str(length)]
        if processes > 1:
            command += ["--processes", str(processes)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1e6 * (spent[1] - spent[0]) / (streams * (tokens - 1))


def wait_until_ready(port: int) -> None:
    for _ in range(300):
        time.sleep(0.1)
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/readyz"):
            return
    raise SystemExit("error: the API process was not ready within 30 s")


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of the API process for each token.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--client-processes", type=int, default=1, help="of bench serve")
    parser.add_argument("--interval-ms", type=float, default=20.0)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
    ):
        engine_address, api_address = f"ipc://{directory}/engine", f"ipc://{directory}/api"
        config = ServerConfig(model_directory=str(built_in_directory()), log_level="warning")
        start = {
            "config": config,
            "index": 0,
            "engine_address": engine_address,
            "own_address": api_address,
            "listener": listener.fileno(),
        }
        engine = multiprocessing.get_context("spawn").Process(
            target=fake_engine,
            args=(engine_address, api_address, args.interval_ms / 1000),
            daemon=True,
        )
        api = subprocess.Popen(
            [sys.executable, "-m", "server.process.api_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
        )
        assert api.stdin is not None
        api.stdin.write(msgspec.json.encode(start) + b"\n")
        api.stdin.flush()
        engine.start()
        port = listener.getsockname()[1]
        wait_until_ready(port)
        asyncio.run(load(port, 8, 8))
        alone, _ = measure(api.pid, port, args.streams, 1)
        began = time.monotonic()
        whole, chunks = measure(api.pid, port, args.streams, args.tokens)
        elapsed = time.monotonic() - began
        tokens = args.streams * (args.tokens - 1)
        user, system = (1e6 * (x - y) / tokens for x, y in zip(whole, alone, strict=True))
        print(
            f"{args.streams} streams x {args.tokens} tokens in {elapsed:.1f} s "
            f"({(tokens + args.streams) / elapsed:.0f} tok/s), {chunks} chunks\n"
            f"API process: {1e6 * sum(alone) / args.streams:.0f} us a request of one token, "
            f"{user + system:.1f} us a token more ({user:.1f} user + {system:.1f} system), "
            f"{1e6 * sum(whole) / (tokens + args.streams):.1f} us a token with its request"
        )
        spent = client_microseconds(port, args.streams, args.tokens, args.client_processes)
        print(f"bench serve: {spent:.1f} us a token that it reads")
        api.kill()
        engine.kill()


if __name__ == "__main__":
    main()
