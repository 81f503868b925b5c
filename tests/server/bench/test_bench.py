"""`wavefill bench serve`: whole runs against servers that the test plays."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.responses import JSONResponse

from server.bench.share import Share, shares
from server.cli.bench.options import with_version
from server.cli.main import main
from tests.support.bench.bench_server import BenchFakeServer, listening
from tests.support.bench.bench_workload import workload
from tests.support.paths import ROOT


def bench(url: str, *arguments: str) -> int:
    """The exit code of `wavefill bench serve`."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--base-url", url, *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(
    ("address", "taken"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("https://host/", "https://host/v1"),
        ("http://host/v1/", "http://host/v1"),
        ("http://host/openai/v1", "http://host/openai/v1"),
    ],
)
def test_an_address_without_a_path_gets_the_version(address: str, taken: str) -> None:
    assert with_version(address) == taken


SMALL = ("--input-len", "7", "--output-len", "6", "--num-prompts", "12", "--warmup", "2")


def test_closed_loop_keeps_the_agreed_concurrency_and_counts_tokens_not_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, file = BenchFakeServer(), tmp_path / "run.json"
    with listening(fake) as url:
        options = ("--concurrency", "3", "--json", str(file), "--goodput", "e2e:60000")
        assert bench(url, *SMALL, *options, "--api-key", "secret-key", "--ignore-eos") == 0
    figures = json.loads(file.read_text())
    assert len(fake.bodies) == 14, "two of them warm up"
    assert fake.most_open == 3
    assert set(fake.keys) == {"Bearer secret-key"}
    assert {body["model"] for body in fake.bodies} == {"fake"}
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(set(prompts)) == 14 and {len(prompt) for prompt in prompts} == {7}
    assert all(body["ignore_eos"] is True for body in fake.bodies)
    assert (figures["completed"], figures["failed"]) == (12, 0)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (84, 72)
    assert figures["good_requests_per_s"] == pytest.approx(figures["requests_per_s"])
    assert figures["arguments"]["model"] == "fake"
    assert "secret-key" not in file.read_text()
    out = capsys.readouterr().out
    assert "closed loop, 3 clients; 7 tokens in, 6 tokens out" in out
    assert "12 answered, 0 failed" in out and "time to first token" in out


@pytest.mark.parametrize("loop", [("--concurrency", "5"), ("--rate", "500")])
def test_several_processes_send_each_request_once(
    tmp_path: Path, loop: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, file = BenchFakeServer(), tmp_path / "run.json"
    with listening(fake) as url:
        options = ("--processes", "3", "--json", str(file), "--warmup", "0")
        assert bench(url, *SMALL, *loop, *options) == 0
    figures = json.loads(file.read_text())
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    expected = [tuple(workload(output_len=6).prompt(random.Random(f"0/measured/{index}")))
                for index in range(12)]  # fmt: skip
    assert sorted(prompts) == sorted(expected)
    assert fake.most_open <= 5 or loop[0] == "--rate"
    assert (figures["completed"], figures["output_tokens"]) == (12, 72)
    assert figures["ttft_ms"]["p50"] > 0
    assert "12 answered, 0 failed" in capsys.readouterr().out


def test_a_run_is_cut_into_no_more_parts_than_it_has_callers() -> None:
    whole = Share(
        base_url="", api_key=None, timeout_s=1.0, workload=workload(), indices=range(100),
        concurrency=7, rate=None,
    )  # fmt: skip
    for processes, callers in ((1, [7]), (3, [3, 2, 2]), (50, [1] * 7)):
        parts = shares(whole, processes)
        assert [part.concurrency for part in parts] == callers
        indices = [index for part in parts for index in part.indices]
        assert sorted(indices) == list(range(100))


def test_open_loop_sends_chat_requests_without_waiting_for_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = BenchFakeServer()
    with listening(fake) as url:
        options = ("--rate", "2000", "--endpoint", "chat", "--model", "chosen")
        assert bench(url, *SMALL, *options, "--warmup", "0") == 0
    assert fake.most_open > 1
    assert {body["model"] for body in fake.bodies} == {"chosen"}
    assert all(body["messages"][0]["role"] == "user" for body in fake.bodies)
    assert "open loop, 2000 requests / s" in capsys.readouterr().out


def test_refused_requests_are_counted_by_kind_and_end_with_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = BenchFakeServer()
    full = {"error": {"message": "the queue is full"}}
    fake.refuse = lambda index: JSONResponse(full, 429) if index % 3 == 2 else None
    with listening(fake) as url:
        assert bench(url, *SMALL, "--warmup", "0", "--concurrency", "1") == 1
    out = capsys.readouterr().out
    assert "8 answered, 4 failed" in out
    assert "4 x HTTP 429, for example:" in out and "the queue is full" in out


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAVEFILL_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("environment", "option", "sent"),
    [
        (None, None, None),
        ("", None, None),
        ("one", None, "one"),
        ("one,two", None, "one"),  # the server's, which takes both
        (" one , two", None, "one"),
        ("one", "mine", "mine"),
        ("one", "", None),
    ],
)
def test_the_key_is_that_of_the_option_or_the_first_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, option: str | None, sent: str | None
) -> None:
    fake = BenchFakeServer()
    if environment is not None:
        monkeypatch.setenv("WAVEFILL_API_KEY", environment)
    address = () if option is None else ("--api-key", option)
    with listening(fake) as url:
        assert bench(url, "--num-prompts", "1", "--warmup", "1", "--output-len", "2", *address) == 0
    assert set(fake.keys) == {None if sent is None else f"Bearer {sent}"}
    assert len(fake.keys) == 3, "one of them asks for the models"


def test_a_key_of_the_environment_is_not_written_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAVEFILL_API_KEY", "secret-key")
    file = tmp_path / "run.json"
    with listening(BenchFakeServer()) as url:
        assert bench(url, *SMALL, "--processes", "2", "--json", str(file)) == 0
    assert "secret-key" not in file.read_text()


@pytest.mark.parametrize("warmup", ["0", "2"])
@pytest.mark.parametrize("of_models", [True, False])
def test_a_key_that_is_missing_is_asked_for(
    warmup: str, of_models: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = BenchFakeServer()
    no_key = JSONResponse({"error": {"message": "Incorrect API key provided"}}, 401)
    fake.refuse = lambda index: no_key
    fake.refuse_models = no_key if of_models else None
    with listening(fake) as url:
        assert bench(url, *SMALL, "--warmup", warmup) == 1
    printed = "".join(capsys.readouterr())
    assert "401" in printed and "Incorrect API key provided" in printed
    assert "give --api-key or set WAVEFILL_API_KEY" in printed


def test_a_failed_warm_up_ends_the_run_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = BenchFakeServer()
    fake.refuse = lambda index: JSONResponse({"error": {"message": "no such key"}}, 401)
    with listening(fake) as url:
        assert bench(url, *SMALL) == 1
    assert len(fake.bodies) == 2
    assert "warm-up: HTTP 401" in capsys.readouterr().err


def test_an_absent_server_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert bench(f"http://127.0.0.1:{port}/v1") == 1
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error and "give the right --base-url" in error


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--endpoint", "chat", "--prompts", "ids"], "use --prompts words"),
        (["--concurrency", "0"], "from 1 on"),
        (["--rate", "-1"], "above 0"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--goodput", "speed:9"], "write ttft:MS"),
        (["--base-url", "127.0.0.1:8000"], "give one like http://"),
        (["--url", "127.0.0.1:8000"], "give one like http://"),
    ],
)
def test_a_wrong_option_is_refused_with_the_remedy(
    arguments: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("http://127.0.0.1:9/v1", *arguments) == 2
    assert printed in capsys.readouterr().err


def test_the_module_in_benchmarks_is_the_same_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.server.bench_serve", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0 and "--goodput" in ran.stdout
