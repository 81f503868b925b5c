"""The file of --config: what it may set, what beats it, and `wavefill config` that explains it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from server.cli.commands import chat, serve
from server.cli.flags import ALL_FLAGS, flag_of, read_config_file, unknown_variables
from server.cli.main import UsageError
from server.config import ServerConfig
from tests.support.cli.pseudo_terminal import pseudo_terminal

WAVEFILL = Path(sys.executable).parent / "wavefill"


def config(file: Path, *words: str, **environment: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args([*words, "--config", str(file)])
    return serve.requested_config(args, environment, read_config_file(args, environment))


def wavefill(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [WAVEFILL, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "server.toml"
    file.write_text(
        'model = "a/b"\nport = 9000\nmax-queue = "1k"\nprefix-cache = false\ngpu-memory = 1\n'
        'allowed-hosts = ["a.example", "b.example:80"]\nserved-model-name = "x,y"\n'
        'api-key = ["one", "two"]\ndtype = "float16"\n'
    )
    return file


def test_a_file_sets_options_of_every_type(file: Path):
    found = config(file)
    assert (found.port, found.max_queue) == (9000, 1024)
    assert found.allowed_hosts == ("a.example", "b.example:80")
    assert found.served_names == ("x", "y")
    assert found.api_keys == ("one", "two")
    engine = found.engine
    assert (engine.model, engine.prefix_cache, engine.gpu_memory, engine.dtype) == (
        *("a/b", False, 1.0, "float16"),
    )


def test_a_file_may_leave_the_number_of_ranks_to_the_server(file: Path):
    file.write_text('tensor-parallel = "auto"\n')
    assert config(file).engine.tensor_parallel == 0


def test_the_command_line_beats_the_environment_that_the_file_and_that_the_default(file: Path):
    assert config(file, WAVEFILL_PORT="9001").port == 9001
    assert config(file, "--port", "9002", WAVEFILL_PORT="9001").port == 9002
    assert config(file, "--prefix-cache").engine.prefix_cache
    assert config(file, "c/d").engine.model == "c/d"
    assert config(file, WAVEFILL_MODEL="e/f").engine.model == "e/f"
    assert config(file).request_history == ServerConfig().request_history


def test_a_variable_may_name_the_file(file: Path):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    environment = {"WAVEFILL_CONFIG": str(file)}
    assert read_config_file(parser.parse_args([]), environment).values["port"] == 9000
    assert unknown_variables(environment) == {}


def test_every_option_may_be_set(tmp_path: Path):
    """By what `wavefill config` prints, with what is commented out set, too."""
    printed = wavefill("config").stdout
    lines = [line.removeprefix("# ") for line in printed.splitlines()]
    file = tmp_path / "all.toml"
    file.write_text("\n".join(lines))
    assert set(tomllib.loads(file.read_text())) >= {flag_of(name)[2:] for name in ALL_FLAGS}
    assert wavefill("config", "--config", file).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-quue = 1", "max-quue: not an option of wavefill serve: did you mean max-queue?"),
        ("max_queue = 1", "write max-queue"),
        ("no-prefix-cache = true", "write prefix-cache = false"),
        ("xyz = 1", "see `wavefill serve --help`"),
        ("memory-fraction = 0.5", "memory-fraction: its name is gpu-memory now"),
        ("[server]\nport = 1", "server: not an option of wavefill serve: write options outside of"),
        ("gpu_memory_utilization = 0.9", "use gpu-memory, a share of the memory that is free"),
        ('model-path = "a/b"', "did you mean model?"),
        ("port = 8000.5", "port = 8000.5: a whole number from 0 up is needed"),
        ("port = -1", "port = -1: a whole number from 0 up"),
        ("port = true", "port = true: a whole number"),
        ('port = "many"', "port many: a whole number"),
        ('prefix-cache = "on"', "prefix-cache = 'on': true or false is needed, without quotes"),
        ('gpu-memory = "0.5"', "gpu-memory = '0.5': a number from 0 up is needed"),
        ("gpu-memory = nan", "gpu-memory = nan: a number"),
        ("gpu-memory = 2", "above 0 and at most 1"),
        ("dtype = 16", "dtype = 16: a text in quotes is needed"),
        ('dtype = "int4"', "dtype int4: choose one of auto, float32"),
        ("allowed-hosts = [1]", "allowed-hosts = [1]: a list of texts is needed"),
        ("api-key = 1", "api-key = 1: a list of texts"),
        ("model = 1", "model = 1: a text"),
        ("port = ?", "not TOML: Invalid value (at line 1, column 8)"),
        ("port: 1", ": a line is like port = 8001 or"),
    ],
)
def test_a_wrong_line_is_named_with_the_file_and_the_remedy(tmp_path: Path, text: str, said: str):
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        config(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value) or "at most 1" in said


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path):
    done = wavefill("serve", "--config", tmp_path / "none.toml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none.toml: No such file or directory: give a TOML file" in done.stderr
    (tmp_path / "binary").write_bytes(b"\xff")
    assert "not UTF-8" in wavefill("plan", "--config", tmp_path / "binary").stderr


def test_config_prints_a_file_that_sets_the_same(file: Path, tmp_path: Path):
    printed = wavefill("config", "--config", file, "--max-num-seqs", "7")
    assert printed.returncode == 0, printed.stderr
    found = tomllib.loads(printed.stdout)
    assert found["max-num-seqs"] == 7 and found["port"] == 9000 and "host" not in found
    assert '# host = "127.0.0.1"' in printed.stdout
    assert "two" not in printed.stdout, "a key is shown"
    copy = tmp_path / "copy.toml"
    copy.write_text(printed.stdout)
    again, before = config(copy), config(file, "--max-num-seqs", "7")
    assert again.engine == before.engine and again.served_names == before.served_names


def test_explain_says_where_each_setting_comes_from(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WAVEFILL_MAX_BODY_BYTES", "1m")
    words = ("config", "--config", file, "--max-num-seqs", "7", "--json")
    found = {each["name"]: each for each in json.loads(wavefill(*words).stdout)}
    assert (found["port"]["value"], found["port"]["source"]) == (9000, f"{file}: port")
    assert found["max-num-seqs"]["source"] == "--max-num-seqs"
    assert found["max-body-bytes"]["source"] == "WAVEFILL_MAX_BODY_BYTES"
    assert found["max-body-bytes"]["value"] == 1 << 20
    assert (found["host"]["value"], found["host"]["source"]) == ("127.0.0.1", "default")
    assert found["api-key"]["value"] == 2 and found["model"]["source"] == f"{file}: model"
    assert all(each["help"] for each in found.values())
    printed = wavefill(*words[:-1], "--explain").stdout
    assert "sequences running or waiting" in printed and "(2 keys)" in printed


def test_explain_fits_a_terminal_and_a_reader_that_leaves_is_no_error(tmp_path: Path):
    with pseudo_terminal((WAVEFILL, "config", "--explain")) as terminal:
        assert terminal.wait() == 0
    assert all(len(line) <= 80 for line in terminal.lines)
    piped = f"{WAVEFILL} config --explain | head -n 1"
    done = subprocess.run(piped, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("model = ") and done.stderr == ""


def test_the_other_commands_read_the_same_file(file: Path):
    plan = wavefill("plan", "tiny-chat", "--device", "cpu", "--config", file)
    assert plan.returncode == 0, plan.stderr
    assert "float16" in plan.stdout and "--gpu-memory 1 of" in plan.stdout
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    args = parser.parse_args(["--config", str(file), "--dtype", "float32"])
    assert chat.serve_arguments(args) == ["--config", str(file), "--dtype", "float32"]
