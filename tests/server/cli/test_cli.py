"""The `wavefill` command: flags, their sources, and what it says when they are wrong."""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.config import EngineConfig
from server.cli.commands import serve
from server.cli.flags import (
    ENGINE_FLAGS,
    SERVER_FLAGS,
    flag_of,
    read_config_file,
    unknown_variables,
)
from server.cli.main import Parser, UsageError, first_key, main
from server.cli.vllm_flags import REMEDIES
from server.config import ServerConfig
from server.process.exclusive_files import LaunchError, socket_directory, store_lock
from tests.support.server.server_process import free_port

COMMAND = Path(sys.executable).parent / "wavefill"


def config(*words: str, **environment: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(words)
    return serve.requested_config(args, environment, read_config_file(args, environment))


def wavefill(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=60)


def test_help_names_every_command_without_importing_torch():
    code = "import sys\nfrom server.cli.main import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'fastapi', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in (
        "serve",
        "chat",
        "bench",
        "tune",
        "plan",
        "pull",
        "ls",
        "rm",
        "config",
        "doctor",
        "completion",
        "version",
    ):
        assert word in done.stdout


def test_every_flag_has_a_field_and_a_line_of_help():
    text = wavefill("serve", "--help").stdout
    fields = {*ServerConfig.__struct_fields__, *EngineConfig.__struct_fields__}
    for name in (*SERVER_FLAGS, *ENGINE_FLAGS):
        assert name in fields
        assert flag_of(name) in text


def test_a_flag_beats_the_environment_and_that_the_default():
    assert config().port == 8000
    assert config(WAVEFILL_PORT="9000").port == 9000
    assert config("--port", "9001", WAVEFILL_PORT="9000").port == 9001
    assert config(WAVEFILL_SERVED_MODEL_NAME="a, b").served_names == ("a", "b")


def test_numbers_may_have_units():
    assert config("--max-model-len", "32k").engine.max_model_len == 32768
    assert config("--max-body-bytes", "1M").max_body_bytes == 1 << 20


def test_hosts_and_origins_are_lists():
    found = config("--allowed-hosts", "llm.example, ::1,10.0.0.5:80", "--allowed-origins", "null")
    assert found.allowed_hosts == ("llm.example", "::1", "10.0.0.5:80")
    assert found.allowed_origins == ("null",)


def test_switches_have_both_directions():
    assert config().engine.prefix_cache
    assert not config("--no-prefix-cache").engine.prefix_cache
    assert not config(WAVEFILL_PREFIX_CACHE="off").engine.prefix_cache


def test_keys_come_from_all_three_sources_and_are_never_shown(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("three\n\n four \n")
    words = ("--api-key", "one", "--api-key-file", str(file))
    found = config(*words, WAVEFILL_API_KEY="two,one")
    assert found.api_keys == ("one", "two", "three", "four")
    assert not any(key in repr(found) for key in found.api_keys)


def test_comments_and_blank_lines_in_a_file_of_keys_open_nothing(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("\ufeff# of the team\n\nalice sk-one\n  # bob sk-two\n#sk-three\n \nsk#four\n")
    assert config("--api-key-file", str(file)).api_keys == ("alice sk-one", "sk#four")
    for text, message in (
        ("# bob sk-two\n", "it holds no key"),
        ("sk-one\nalice sk-two # new\n", "line 2: no comment stands after a key"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message) as refused:
            config("--api-key-file", str(file))
        assert "sk-" not in str(refused.value)


def test_the_model_and_the_file_of_keys_may_be_set_by_variables(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("secret")
    variables = {"WAVEFILL_MODEL": "some/model", "WAVEFILL_API_KEY_FILE": str(file)}
    assert unknown_variables({**variables, "WAVEFILL_REVISION": "main"}) == {}
    assert config(**variables).engine.model == "some/model"
    assert config(**variables).api_keys == ("secret",)
    assert config("other/model", **variables).engine.model == "other/model"
    assert config().engine.model == "tiny-chat"


def test_the_number_of_ranks_may_be_left_to_the_server():
    assert config("-tp", "auto").engine.tensor_parallel == 0
    assert config(WAVEFILL_TENSOR_PARALLEL="auto").engine.tensor_parallel == 0


@pytest.mark.parametrize("folder", ["x" * 100, "missing"])
def test_a_folder_that_cannot_hold_the_sockets_is_an_error_of_one_line(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if folder != "missing":
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / folder))
    with pytest.raises(LaunchError, match="set TMPDIR to a"), socket_directory():
        pass
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--port", "many"], {}, "--port many: a whole number from 0 up is needed"),
        (["--api-workers", "0"], {}, "--api-workers 0: choose from 1 to 64"),
        (["-dp", "0"], {}, "--data-parallel 0: choose from 1 to 64"),
        (["--data-parallel-size", "65"], {}, "--data-parallel 65: choose from 1 to 64"),
        (["-tp", "17"], {}, "--tensor-parallel 17: choose from 1 to 16, or auto"),
        (["-tp", "all"], {}, "--tensor-parallel all: a whole number from 0 up is needed"),
        (["--port", "70000"], {}, "--port 70000: ports run from 1 to 65535"),
        (["--drain-seconds", "nan"], {}, "--drain-seconds nan: a number from 0 up"),
        (["--root-path", "llm/"], {}, "--root-path llm/: a path such as /llm or /team/llm"),
        (["--drain-delay", "nan"], {}, "--drain-delay nan: a number from 0 up"),
        (["--batch-concurrency", "0"], {}, "--batch-concurrency 0: batches need"),
        (["--max-file-bytes", "17g"], {}, "to --max-data-bytes (17179869184)"),
        (["--gpu-memory", "1.5"], {}, "--gpu-memory 1.5: it must be above 0"),
        (
            ["--memory-fraction", "0.5"],
            {},
            "--memory-fraction (WAVEFILL_MEMORY_FRACTION): its name is",
        ),
        ([], {"WAVEFILL_MEMORY_FRACTION": "0.5"}, "its name is --gpu-memory now"),
        (["--max-queue", "0"], {}, "--max-queue 0: every request would be rejected"),
        (["--stall-seconds", "0"], {}, "--stall-seconds 0: a step may take longer"),
        (["--max-body-bytes", "1"], {}, "--max-body-bytes 1: no request is so short"),
        (["--max-header-bytes", "1"], {}, "--max-header-bytes 1: ordinary clients send about"),
        (["--allowed-origins", '["*"]'], {}, '--allowed-origins ["*"]: an origin is like'),
        (["--allowed-hosts", "http://x"], {}, "--allowed-hosts http://x: a host is a name or"),
        (["--host", ""], {}, "--host: it is empty: give an address, 0.0.0.0 for all, or leave"),
        (["--api-key", ""], {}, "--api-key: it is empty: give a key, or leave"),
        (["--kv-dtype", "int8"], {}, "--kv-dtype int8: choose one of auto, fp8_e4m3"),
        (["--served-model-name", "a,b,a"], {}, "--served-model-name: 'a' is there twice"),
        (["--page-size", "24"], {}, "--page-size 24: choose one of 16, 32, 64, 128"),
        (["--snapshot-every", "1"], {}, "--snapshot-every 1: at least 64 tokens lie between two"),
        (
            ["--max-model-len", "1"],
            {},
            "--max-model-len 1: a prompt and its answer take 2 tokens: raise it",
        ),
        (["--max-num-seqs", "128k"], {}, "--max-num-seqs 131072: a step has at most 65535 of"),
        (["--seed", "-3"], {}, "--seed -3: a whole number from 0 up is needed"),
        (
            ["--chat-template", "nowhere.jinja"],
            {},
            "nowhere.jinja: no such file: give a file with a",
        ),
        (
            ["--api-key-file", "nowhere"],
            {},
            "--api-key-file nowhere: No such file or directory: give a text file",
        ),
        (
            ["--dashboard-keys", "eve"],
            {},
            "--dashboard-keys eve: no API key has this name, the server",
        ),
        (
            ["--dashboard-keys", "alice,eve", "--api-key", "alice sk-1"],
            {},
            "--dashboard-keys eve: no API key has this name, the server has alice",
        ),
        ([], {"WAVEFILL_API_KEY": " ,"}, "WAVEFILL_API_KEY: it has commas alone: give a key, or"),
        ([], {"WAVEFILL_DEVICE": "tpu"}, "WAVEFILL_DEVICE tpu: choose one of auto, cpu, cuda"),
        ([], {"WAVEFILL_PREFIX_CACHE": "maybe"}, "WAVEFILL_PREFIX_CACHE maybe: choose on or off"),
    ],
)
def test_a_wrong_value_is_named_with_its_source(
    words: list[str], environment: dict[str, str], expected: str
):
    with pytest.raises(UsageError) as caught:
        config(*words, **environment)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "serve --max-num-batched-tokens 2048 --pipeline_parallel_size=2 some/model",
            [
                "error: --max-num-batched-tokens: not an option of wavefill serve: "
                "use --max-batched-tokens",
                "       --pipeline_parallel_size: not an option of wavefill serve: leave it out, "
                "or use --tensor-parallel, which divides a model among GPUs",
            ],
        ),
        (
            "serve -c 4096 -ngl 99 -t 8 -hf some/model",
            [
                "error: -c: not an option of wavefill serve: use --max-model-len, or --kv-tokens "
                "for all requests together",
                "       -ngl: not an option of wavefill serve: leave it out, layers are all on the "
                "device",
                "       -t: not an option of wavefill serve: use --threads",
                "       -hf: not an option of wavefill serve: write wavefill serve MODEL",
            ],
        ),
        (
            "plan --mem-fraction-static 0.8 --max-running-requests 4",
            [
                "error: --mem-fraction-static: not an option of wavefill plan: use --gpu-memory, "
                "a share of the memory that is free",
                "       --max-running-requests: not an option of wavefill plan: use --max-num-seqs",
            ],
        ),
        (
            "chat --context-length 5 --enforce",
            [
                "error: --context-length: not an option of wavefill chat: use --max-model-len",
                "       --enforce: not an option of wavefill chat: see `wavefill chat --help`",
            ],
        ),
        ("serve --max_model_len 5", ["error: --max_model_len: write --max-model-len"]),
        (
            "serve --max-model-length 5",
            [
                "error: --max-model-length: not an option of wavefill serve: "
                "did you mean --max-model-len?"
            ],
        ),
        # An abbreviation would mean something else once there is another option like it.
        (
            "serve --gpu-mem 1",
            ["error: --gpu-mem: not an option of wavefill serve: did you mean --gpu-memory?"],
        ),
        (
            "plan --frobnicate",
            ["error: --frobnicate: not an option of wavefill plan: see `wavefill plan --help`"],
        ),
        (
            "bench serve --num-prompt 3",
            ["error: --num-prompt: not an option of wavefill bench: did you mean --num-prompts?"],
        ),
        (
            "serve a b",
            ["error: b: one argument too many (lists have commas): see `wavefill serve --help`"],
        ),
        (
            "serve --log-requests=1",
            ["error: --log-requests/--no-log-requests takes no value: see `wavefill serve --help`"],
        ),
        ("servee", ["error: wavefill servee: no such command: did you mean `wavefill serve`?"]),
        ("run some/model", ["error: wavefill run: no such command: did you mean `wavefill chat`?"]),
        ("launch x", ["error: wavefill launch: no such command: did you mean `wavefill serve`?"]),
        ("frobnicate", ["error: wavefill frobnicate: no such command: see `wavefill --help`"]),
        (
            "serve --api-key",
            ["error: --api-key: expected one argument: see `wavefill serve --help`"],
        ),
    ],
)
def test_a_wrong_option_is_an_error_of_one_line_with_what_to_write_instead(
    words: str, expected: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == expected


def test_the_remedies_for_options_of_others_name_options_that_there_are():
    parser = Parser()
    serve.add_arguments(parser)
    known = set(parser.options())
    assert not {f"--{name}" for name in REMEDIES} & known
    named = {word for text in REMEDIES.values() for word in re.findall(r"--[a-z-]+", text)}
    assert named <= known


def test_the_service_links_of_kubernetes_are_not_taken_for_options():
    links = {
        "WAVEFILL_PORT": "tcp://10.0.0.1:8000",
        "WAVEFILL_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WAVEFILL_SERVICE_HOST": "10.0.0.1",
    }
    assert config(**links).port == 8000
    assert unknown_variables(links) == {}


def test_a_misspelt_variable_is_named_with_what_to_set_instead():
    names = (
        "MAX_MODELLEN",
        "MAX_MODEL_LEN",
        "API_KEY",
        "GPU_MEMORY_UTILIZATION",
        "MODEL_PATH",
        "FROBNICATE",
    )
    assert unknown_variables({f"WAVEFILL_{name}": "1" for name in names}) == {
        "WAVEFILL_MAX_MODELLEN": "did you mean WAVEFILL_MAX_MODEL_LEN?",
        "WAVEFILL_GPU_MEMORY_UTILIZATION": "use --gpu-memory, a share of the memory that is free",
        "WAVEFILL_MODEL_PATH": "write wavefill serve MODEL",
        "WAVEFILL_FROBNICATE": "see `wavefill serve --help`",
    }


def test_a_variable_that_is_empty_sets_nothing():
    names = (*SERVER_FLAGS, *ENGINE_FLAGS, "api_key", "model", "revision", "config")
    assert config(**{f"WAVEFILL_{name.upper()}": "" for name in names}) == config()


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ((), False),
        (("--host", "localhost"), False),
        (("--host", "::1"), False),
        (("--host", "0.0.0.0"), True),
        (("--host", "::"), True),
        (("--host", "0.0.0.0", "--api-key", "secret"), False),
    ],
)
def test_who_lets_the_network_in_without_a_key_is_warned(
    words: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
):
    serve.warn_if_open(config(*words))
    assert ("without a key" in caplog.text) == warned
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("", False),
        ("--allowed-hosts llm.example", False),
        ("--allowed-hosts *", True),
        ("--allowed-hosts * --api-key secret", False),
        ("--host 0.0.0.0", True),
        ("--host 0.0.0.0 --allowed-hosts llm.example,::1,[::2]:80", False),
    ],
)
def test_who_answers_to_any_host_without_a_key_is_warned(
    words: str, warned: bool, caplog: pytest.LogCaptureFixture
):
    serve.warn_if_open(config(*words.split()))
    assert ("--allowed-hosts" in caplog.text) == warned


def test_a_second_server_on_a_response_store_ends_with_one_line_that_names_it(tmp_path: Path):
    store = str(tmp_path / "store")
    with store_lock(store):
        done = wavefill("serve", "--port", str(free_port()), "--response-store", store)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --response-store {store}: another server uses this file: stop it, or give each "
        "server a file of its own\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-queue 0", "--max-queue 0: every"),
        ("--log-format JSON --max-queue 0", "--max-queue 0: every"),
        ("/no/such/model", "/no/such/model: no such"),
    ],
)
def test_a_json_log_has_the_error_that_ends_the_command(words: str, expected: str):
    port = str(free_port())
    done = wavefill("serve", "--port", port, "--log-format", "json", *words.split())
    event = json.loads(done.stderr)
    assert done.returncode == 2
    assert event["level"] == "error" and event["message"].startswith(expected)


def test_a_port_in_use_is_an_error_before_the_model_is_read():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = wavefill("serve", "/no/such/model", "--port", str(port))
    assert done.returncode == serve.PORT_IN_USE
    assert done.stderr == (
        f"error: 127.0.0.1:{port} is in use: stop the program that listens there, or choose "
        "another --port\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/no/such/model"], "/no/such/model: no such directory, and not a Hub id"),
        (["nobody/nothing"], "run `wavefill pull nobody/nothing`"),
        (["--max-model-len", "9999"], "--max-model-len 9999 exceeds the 2048 positions"),
        (["--kv-tokens", "900g"], "--kv-tokens"),
        *(
            pytest.param(words, expected, marks=pytest.mark.slow)
            for words, expected in (
                (["--split-planner", "fa3"], "--split-planner fa3 plans the decode kernel of fl"),
                (["--deterministic"], "--deterministic needs a CUDA GPU"),
            )
        ),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_command_with_one_line(
    words: list[str], expected: str
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = wavefill("serve", *words, "--device", "cpu", "--port", port)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and expected in lines[0], done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_of_a_client_command_is_the_first_one_without_its_name():
    assert first_key({"WAVEFILL_API_KEY": " alice sk-1 ,bob sk-2"}) == "sk-1"
    assert first_key({"WAVEFILL_API_KEY": ", sk-2"}) == "sk-2"
    assert first_key({"WAVEFILL_API_KEY": ""}) == ""


@pytest.mark.parametrize(
    ("endpoint", "found", "message"),
    [
        ("collector:4317", True, "a URL of OTLP over HTTP is needed"),
        ("http://collector:4318", False, "pip install 'wavefill[otel]'"),
        ("http://collector:4318", None, "pip install 'wavefill[otel]'"),
    ],
)
def test_traces_need_a_url_and_the_extra(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, found: bool | None, message: str
):
    def find(name: str) -> object:
        if found is None:
            raise ModuleNotFoundError(name)
        return found or None

    monkeypatch.setattr("server.cli.commands.serve.find_spec", find)
    with pytest.raises(UsageError, match=re.escape(message)):
        config("--otlp-traces-endpoint", endpoint)
