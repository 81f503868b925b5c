"""The `wavefill` command: flags, their sources, and what ends it."""

from __future__ import annotations

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
    unknown_variables,
)
from server.cli.main import UsageError, first_key
from server.config import ServerConfig
from server.process.exclusive_files import LaunchError, socket_directory, store_lock
from tests.support.cli.command import config, wavefill
from tests.support.server.server_process import free_port


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
