"""Wavefill on a Ray cluster: replicas on its nodes, behind Ray Serve's HTTP proxy.

    pip install wavefill "ray[serve]"                    # on every node, and copy this file to one
    serve run ray_serve:app model=Qwen/Qwen3-8B num_gpus=1 max_replicas=4

Each replica is an actor that starts `wavefill serve` on a loopback port and passes requests on to
it.  With num_gpus=N it has N GPUs of one node, and an engine on each (`--data-parallel N`), or on
every tensor_parallel of them, among which the model is divided (`--tensor-parallel`).

Requests with the same beginning go to the replica that has it in its prefix cache, unless it has
much more to do than another.  The ingress, on the head node, sends a request to another replica
if the first one is lost before any of the answer was passed to the caller.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

BLOCK_CHARACTERS = 256  # prefixes are compared in blocks of this many
MOST_BLOCKS = 128
REMEMBERED_PREFIXES = 200_000
MOST_AHEAD = 8  # open requests that the replica of a prefix may have more than another one
RETRY_SECONDS = 60.0  # in which a request whose replica was lost is sent again
LOST_STATUS = 503  # a server that drains or is still loading: another one may answer
OF_RAY = {"x-request-id", "date", "server"}  # which Ray's proxy adds to every answer
PER_CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "te"}
PARALLEL = re.compile(r"(?:--(?:tensor|data)-parallel(?:-size)?|-[td]p)(?:=|$)")
SIGKILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG

logger = logging.getLogger("ray.serve")


class Options(BaseModel):
    """The arguments of `serve run`, and of `args` in a Serve configuration file."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("tiny-chat", description="a directory on every node, or a Hub id")
    options: str = Field("", description="further options of `wavefill serve`")
    num_gpus: float = Field(
        0, ge=0, le=64, description="of a replica, on one node; a whole number above 1"
    )
    tensor_parallel: int = Field(
        1, ge=1, le=16, description="GPUs that share a model; num_gpus are a multiple of them"
    )
    num_cpus: float = Field(1, ge=0, description="of a replica")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(32, gt=0, description="a replica, beyond which Ray adds")
    max_ongoing_requests: int = Field(
        256, ge=1, description="a replica; others wait in the ingress"
    )
    upscale_delay_s: float = Field(30, ge=0)
    downscale_delay_s: float = Field(600, ge=0)
    start_seconds: float = Field(1800, gt=0, description="within which a server must be ready")
    drain_seconds: float = Field(
        30, ge=0, description="for open requests when a replica is stopped"
    )

    @field_validator("num_gpus")
    @classmethod
    def _whole_above_one(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("GPUs of a replica beyond one are whole: choose 2, 3, ...")
        return value

    @field_validator("options")
    @classmethod
    def _not_what_ray_has_to_know(cls, value: str) -> str:
        for word in shlex.split(value):
            if PARALLEL.match(word):
                raise ValueError(
                    f"{word}: set num_gpus and tensor_parallel instead, by which Ray finds a node"
                )
        return value

    @model_validator(mode="after")
    def _all_gpus_have_an_engine(self) -> Options:
        if self.tensor_parallel > 1 and self.num_gpus % self.tensor_parallel:
            raise ValueError(
                f"num_gpus={self.num_gpus:g} is no multiple of "
                f"tensor_parallel={self.tensor_parallel}, the GPUs of each engine"
            )
        return self

    def arguments(self) -> list[str]:
        """Of `wavefill serve`, after the model."""
        words = ["--drain-seconds", str(self.drain_seconds), *shlex.split(self.options)]
        if self.tensor_parallel > 1:
            words += ["--tensor-parallel", str(self.tensor_parallel)]
        engines = int(self.num_gpus) // self.tensor_parallel
        return [*words, "--data-parallel", str(engines)] if engines > 1 else words


class Forwarded(NamedTuple):
    """A request on its way to a replica."""

    prefixes: list[bytes]  # a hash of each beginning of the prompt, the shortest first
    method: str
    path: str  # with the query
    headers: list[tuple[str, str]]
    body: bytes


class ServerLost(Exception):
    """The server of a replica did not answer, or not to the end."""


def prompt_prefixes(body: bytes) -> list[bytes]:
    """A chain of hashes over the blocks of a request's messages, tools and prompt."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    if not isinstance(fields, dict):
        return []
    names = ("system", "instructions", "tools", "messages", "prompt", "input")  # templates' order
    said = [fields[name] for name in names if name in fields]
    text = orjson.dumps(said)[: BLOCK_CHARACTERS * MOST_BLOCKS]
    digest, chain = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(text), BLOCK_CHARACTERS):
        digest.update(text[start : start + BLOCK_CHARACTERS])
        chain.append(digest.digest())
    return chain


class PrefixRouter(RequestRouter):
    """Sends a request where the longest beginning of its prompt went before."""

    def initialize_state(self, **_: Any) -> None:
        self._homes: OrderedDict[bytes, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """In order: the replica of the prefix, unless it is far ahead; two others at random."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if not candidate_replicas:
            return []
        loads = {
            each.replica_id: self.replica_queue_len_cache.get(each.replica_id) or 0
            for each in candidate_replicas
        }
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        home = self._home(pending_request)
        preferred = [each for each in candidate_replicas if each.replica_id == home]
        if preferred and loads[preferred[0].replica_id] - min(loads.values()) <= MOST_AHEAD:
            return [preferred, two]
        return [two, candidate_replicas]

    def _home(self, pending: PendingRequest | None) -> ReplicaID | None:
        prefixes = pending.args[0].prefixes if pending is not None and pending.args else []
        alive = {each.replica_id for each in self.curr_replicas.values()}
        for prefix in reversed(prefixes):
            home = self._homes.get(prefix)
            if home in alive:
                self._homes.move_to_end(prefix)
                return home
        return None

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        for prefix in pending_request.args[0].prefixes if pending_request.args else []:
            self._homes[prefix] = replica_id
            self._homes.move_to_end(prefix)
        while len(self._homes) > REMEMBERED_PREFIXES:
            self._homes.popitem(last=False)


def _die_with_parent() -> None:
    """In the new process: SIGKILL when the actor's process ends, however it ends."""
    ctypes.CDLL(None).prctl(SIGKILL_WITH_PARENT, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@serve.deployment(health_check_period_s=2, health_check_timeout_s=10)
class Replica:
    """One `wavefill serve`, and what passes requests on to it."""

    async def __init__(self, model: str, options: list[str], start_seconds: float) -> None:
        self._port = _free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        command = [Path(sys.executable).parent / "wavefill", "serve", model, *options]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._process = subprocess.Popen(command, preexec_fn=_die_with_parent)
        unlimited = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._session = aiohttp.ClientSession(
            timeout=unlimited, auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        )
        deadline = time.monotonic() + start_seconds
        while await self._status("/readyz") != 200:
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(f"wavefill serve ended with code {code}: see the actor's log")
            if time.monotonic() > deadline:
                raise RuntimeError(f"wavefill serve was not ready in {start_seconds} s")
            await asyncio.sleep(0.2)

    async def _status(self, path: str) -> int:
        try:
            async with self._session.get(self._url + path, timeout=5) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0

    async def check_health(self) -> None:
        """Ray replaces the replica if this raises: its server has ended, or stands still."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"wavefill serve ended with code {code}")
        if await self._status("/livez") != 200:
            raise RuntimeError("wavefill serve does not answer /livez with 200")

    async def relay(self, request: Forwarded) -> AsyncIterator[tuple[int, list[Any]] | bytes]:
        """Status and headers, then the body: a stream in pieces, anything else as a whole."""
        try:
            async with self._session.request(
                request.method,
                self._url + request.path,
                headers=request.headers,
                data=request.body,
                allow_redirects=False,
            ) as answer:
                streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
                if not streamed and "chunked" not in answer.headers.get("transfer-encoding", ""):
                    body = await answer.read()  # all of it before any of it is passed on
                    yield answer.status, _kept(answer.headers.items())
                    yield body
                    return
                yield answer.status, _kept(answer.headers.items())
                async for piece in answer.content.iter_any():
                    yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{type(error).__name__}: {error}") from None

    def __del__(self) -> None:
        """Ray calls it when no request is open any more."""
        process: subprocess.Popen[bytes] | None = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()


def _kept(headers: Any) -> list[tuple[str, str]]:
    """Without those that speak of one connection only."""
    return [(name, value) for name, value in headers if name.lower() not in PER_CONNECTION]


@serve.deployment(
    max_ongoing_requests=10_000,
    ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
)
class Ingress:
    """Takes what callers send, and sees that what a lost replica had not begun is answered."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._relay = replicas.options(method_name="relay", stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        forwarded = Forwarded(
            prompt_prefixes(body), request.method, path, _kept(request.headers.items()), body
        )
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            last = time.monotonic() > deadline
            answer = self._relay.remote(forwarded)
            try:
                status, headers = await anext(answer)
                first = await anext(answer, b"")  # with it an answer has begun
            except RayError as error:
                answer.cancel()
                if not _replica_lost(error) or last:
                    raise
                logger.warning("a replica was lost, the request is sent again: %s", error)
            except BaseException:
                answer.cancel()
                raise
            else:
                if status != LOST_STATUS or request.method != "POST" or last:
                    return _passed_on(status, headers, first, answer)
                answer.cancel()
            await asyncio.sleep(0.2)


def _replica_lost(error: RayError) -> bool:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, (RayActorError, ServerLost))


def _passed_on(status: int, headers: list[tuple[str, str]], first: bytes, rest: Any) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        try:
            yield first
            async for piece in rest:
                yield piece
        finally:  # the caller has left, or all is sent
            rest.cancel()

    answer = StreamingResponse(pieces(), status)
    answer.raw_headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in headers
        if name.lower() not in OF_RAY
    ]
    return answer


def app(options: Options) -> serve.Application:
    """What `serve run ray_serve:app` and a Serve configuration file build."""
    replicas = Replica.options(
        max_ongoing_requests=options.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.drain_seconds + 15,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
        ),
    )
    return Ingress.bind(replicas.bind(options.model, options.arguments(), options.start_seconds))
