"""The engine process, started as the launcher starts it and spoken to through its channels."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from runtime.config import ConfigError, EngineConfig
from runtime.engine.process import short_errors
from runtime.ipc.channel import Receiver, Sender
from runtime.messages import (
    Abort,
    EngineRequest,
    EngineRequests,
    FromEngine,
    Hello,
    Progress,
    Ready,
    RequestOutput,
    SamplingParams,
    StepOutput,
    ToEngine,
)
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.paths import ROOT

WAIT_SECONDS = 60
GREEDY = SamplingParams(max_tokens=5, temperature=0)


def start_process(
    directory: Path, config: EngineConfig, clients: int = 1
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.engine.process"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    start = {
        "config": msgspec.to_builtins(config),
        "epoch": 3,
        "own_address": f"ipc://{directory}/engine",
        "ready_file": str(directory / "serving-0"),
        "client_addresses": [f"ipc://{directory}/api-{index}" for index in range(clients)],
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(start).encode() + b"\n")
    process.stdin.flush()
    return process


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stderr):
        assert pipe is not None
        pipe.close()


@dataclass
class Played:
    """Two API processes played by the test."""

    process: subprocess.Popen[bytes]
    sender: Sender[ToEngine]
    receivers: list[Receiver[FromEngine]]
    heard: list[list[FromEngine]] = field(default_factory=lambda: [[], []])

    def wait_for(self, found: Callable[[FromEngine], Any], client: int = 0) -> Any:
        """The first thing that `found` makes of a message, read or yet to come."""
        index = 0
        for _ in range(WAIT_SECONDS * 10):
            heard = self.heard[client]
            while index < len(heard):
                if result := found(heard[index]):
                    return result
                index += 1
            heard += self.receivers[client].receive(0.1)
            assert heard[index:] or self.process.poll() is None, "the engine process ended"
        raise AssertionError("the message did not come")

    def end_of(self, id: int, client: int = 0) -> tuple[list[int], RequestOutput]:
        """All tokens of a request, and its last Output."""
        last: RequestOutput = self.wait_for(lambda message: ended(message, id), client)
        steps = [m for m in self.heard[client] if isinstance(m, StepOutput)]
        own = [output for step in steps for output in outputs_of(step) if output.id == id]
        assert [output for output in own if output.finish is not None] == [last]
        return [token for output in own for token in output.tokens], last


def outputs_of(step: StepOutput) -> list[RequestOutput]:
    """All outputs of a step, the columns first."""
    columns = zip(array("q", step.ids), array("i", step.tokens), strict=True)
    return [RequestOutput(id, [token]) for id, token in columns] + step.outputs


def ended(message: FromEngine, id: int) -> RequestOutput | None:
    if not isinstance(message, StepOutput):
        return None
    own = [output for output in message.outputs if output.id == id]
    return next((output for output in own if output.finish is not None), None)


def as_ready(message: FromEngine) -> Ready | None:
    return message if isinstance(message, Ready) else None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    return directory


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Played]:
    directory = tmp_path_factory.mktemp("sockets")
    config = EngineConfig(model=str(checkpoint), device="cpu", max_num_seqs=4, kv_tokens=4096)
    process = start_process(directory, config, clients=2)
    decoder = msgspec.msgpack.Decoder(FromEngine)
    played = Played(
        process,
        Sender(f"ipc://{directory}/engine"),
        [Receiver(f"ipc://{directory}/api-{index}", decoder) for index in range(2)],
    )
    yield played
    end_process(process)
    played.sender.close()
    for receiver in played.receivers:
        receiver.close()


def test_loading_is_reported_before_ready_to_every_client(played: Played) -> None:
    for client in (0, 1):
        ready: Ready = played.wait_for(as_ready, client)
        assert ready.epoch == 3 and ready.model_type == "qwen3" and ready.device == "cpu"
        assert ready.capacity_tokens == 4096 and ready.weight_bytes > 0
        before = played.heard[client][: played.heard[client].index(ready)]
        assert before and all(isinstance(message, Progress) for message in before)


def test_request_is_answered_to_its_own_client_only(played: Played) -> None:
    played.wait_for(as_ready)
    played.sender.send(EngineRequest(10, 0, [1, 2, 3], GREEDY))
    played.sender.send(EngineRequest(11, 1, [1, 2, 3], GREEDY))
    first, second = played.end_of(10)[0], played.end_of(11, client=1)[0]
    assert len(first) == 5 and first == second
    others = [m for m in played.heard[0] if isinstance(m, StepOutput)]
    assert 11 not in {output.id for step in others for output in outputs_of(step)}


def test_requests_that_come_in_one_message_are_answered_each(played: Played) -> None:
    played.wait_for(as_ready)
    requests = [EngineRequest(id, 0, [1, 2, 3], GREEDY) for id in (12, 13)]
    played.sender.send(EngineRequests(requests, ()))
    first, second = played.end_of(12)[0], played.end_of(13)[0]
    assert len(first) == 5 and first == second


def test_abort_ends_a_request_and_the_next_one_is_answered(played: Played) -> None:
    ready: Ready = played.wait_for(as_ready)
    long = SamplingParams(max_tokens=ready.max_model_len, temperature=0)
    played.sender.send(EngineRequest(20, 0, [5, 6], long))
    played.sender.send(Abort(20))
    assert played.end_of(20)[1].finish == "abort"
    played.sender.send(EngineRequest(21, 0, [5, 6], GREEDY))
    assert len(played.end_of(21)[0]) == 5


def test_an_api_process_that_begins_anew_drops_its_requests_and_no_others(played: Played) -> None:
    ready: Ready = played.wait_for(as_ready)
    long = SamplingParams(max_tokens=ready.max_model_len, temperature=0)
    played.sender.send(EngineRequest(25, 0, [5, 6], long))
    played.sender.send(EngineRequest(26, 1, [1, 2, 3], GREEDY))
    played.sender.send(Hello(0))
    assert played.end_of(25)[1].finish == "abort"
    assert len(played.end_of(26, client=1)[0]) == 5

    def is_second(_: FromEngine) -> bool:
        return sum(message == ready for message in played.heard[0]) == 2

    played.wait_for(is_second)


def test_request_that_cannot_run_is_refused_and_others_run_on(played: Played) -> None:
    ready: Ready = played.wait_for(as_ready)
    played.sender.send(EngineRequest(30, 0, [ready.vocab_size], GREEDY))
    assert played.end_of(30)[1].finish == "error"
    played.sender.send(EngineRequest(31, 0, [1], GREEDY))
    assert len(played.end_of(31)[0]) == 5


def test_second_request_of_an_id_is_refused_and_the_first_goes_on(played: Played) -> None:
    ready: Ready = played.wait_for(as_ready)
    long = SamplingParams(max_tokens=min(200, ready.max_model_len - 8), temperature=0)
    played.sender.send(EngineRequest(40, 0, [5, 6], long))
    played.sender.send(EngineRequest(40, 1, [7, 8], GREEDY))
    tokens, last = played.end_of(40, client=1)
    assert (tokens, last.finish) == ([], "error") and last.is_request_error
    assert last.error == "a request with this id is running already"
    tokens, last = played.end_of(40)
    assert (len(tokens), last.finish) == (long.max_tokens, "length")


def test_idle_engine_gives_a_sign_of_life_and_sleeps(played: Played) -> None:
    played.wait_for(as_ready)
    before = psutil.Process(played.process.pid).cpu_times()
    count = sum(isinstance(message, StepOutput) for message in played.heard[0])

    def is_third(_: FromEngine) -> bool:
        return sum(isinstance(message, StepOutput) for message in played.heard[0]) >= count + 3

    played.wait_for(is_third)
    after = psutil.Process(played.process.pid).cpu_times()
    assert after.user - before.user < 0.3


def test_ctrl_c_is_left_to_the_parent_and_sigterm_ends_it(checkpoint: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(checkpoint), device="cpu", kv_tokens=4096)
    process, started = start_process(tmp_path, config), time.monotonic()
    receiver = Receiver(f"ipc://{tmp_path}/api-0", msgspec.msgpack.Decoder(FromEngine))
    while not any(isinstance(message, Ready) for message in receiver.receive(0.1)):
        assert process.poll() is None
    assert started < float((tmp_path / "serving-0").read_text()) < time.monotonic()
    process.send_signal(signal.SIGINT)
    assert any(isinstance(message, StepOutput) for message in receiver.receive(10))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    end_process(process)
    receiver.close()


def test_process_ends_when_its_parent_is_gone_even_while_it_loads(
    checkpoint: Path, tmp_path: Path
) -> None:
    process = start_process(tmp_path, EngineConfig(model=str(checkpoint), device="cpu"))
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) != 0
    end_process(process)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": "/nowhere"}, "/nowhere"),
        ({"max_model_len": 10**9}, "--max-model-len 1000000000"),
        ({"split_planner": "fa3"}, "--split-planner fa3"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_wish_that_cannot_be_met_ends_with_code_2_and_one_line(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], names: str
) -> None:
    engine_options = {"model": str(checkpoint), "device": "cpu", **changes}
    process = start_process(tmp_path, EngineConfig(**engine_options))
    assert process.stderr is not None
    assert process.wait(WAIT_SECONDS) == 2
    said = process.stderr.read().decode().splitlines()
    assert len(said) == 1 and said[0].startswith("error: ") and names in said[0]
    end_process(process)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (torch.OutOfMemoryError("CUDA out of memory: 2 GiB.\nMore of it"), "memory: 2 GiB."),
        (MemoryError(), ": MemoryError"),
    ],
    ids=["of a GPU", "of the host, which says nothing"],
)
def test_memory_that_runs_out_ends_with_code_1_and_one_line(
    capfd: pytest.CaptureFixture[str], error: Exception, end: str
) -> None:
    """The launcher starts another engine then; code 2 would end the server."""
    with pytest.raises(SystemExit) as ended, short_errors():
        raise error
    [line] = capfd.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert line.startswith("error: memory ran out") and line.endswith(end)


def test_an_error_is_one_piece_that_comes_after_the_report_of_the_last_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    stderr = SimpleNamespace(write=done.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr("runtime.engine.process.time", SimpleNamespace(sleep=done.append))
    with pytest.raises(SystemExit), short_errors():
        raise ConfigError("--kv-tokens 9: too few")
    seconds, text = done
    assert float(str(seconds)) > 0.2, "an API process looks for phases every 0.1 s"
    assert text == "error: --kv-tokens 9: too few\n"


def test_an_error_of_the_device_that_is_not_memory_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="illegal"), short_errors():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
