"""From the name of a model to its files: built in, a directory, or the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli.download_progress import DownloadProgress, progress_bars
from server.cli.model_source import ModelNotFound, resolve_model
from tests.support.server.fake_hub import FakeHub, fake_hub

FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "training_args.pt": b"a pickle",
    "run.py": b"raise SystemExit",
}
SAFE = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub(dict(FILES)) as hub:
        yield hub


def pull(hub: FakeHub, home: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """`wavefill pull` with a cache of its own: exit code, stdout, stderr."""
    done = subprocess.run(
        [Path(sys.executable).parent / "wavefill", "pull", *words],
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_the_built_in_model_is_found_without_importing_its_package():
    code = (
        "import sys; from server.cli.model_source import resolve_model;"
        "directory, name = resolve_model('tiny-chat');"
        "assert name == 'tiny-chat' and (directory / 'config.json').is_file();"
        "assert not {'torch', 'model_zoo', 'huggingface_hub'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_directory_is_served_under_its_own_name(tmp_path: Path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "my-model")) == (tmp_path / "my-model", "my-model")


def test_a_directory_without_a_model_and_a_file_are_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(ModelNotFound, match=f"^{tmp_path} holds no config.json: give a directory"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"model.gguf is a file: give the directory with"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "name",
    ["./missing", "/missing", "~/missing", "missing", "a/b/c", "../b", "~nobody-here/model"],
)
def test_a_name_that_can_be_no_model_is_refused_with_the_choices(name: str):
    with pytest.raises(ModelNotFound, match=r"no such directory, and not a Hub id .*tiny-chat"):
        resolve_model(name)


def test_a_path_that_cannot_be_looked_at_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ModelNotFound, match=r"File name too long: give a directory") as caught:
        resolve_model("/" + 5000 * "a")
    assert len(str(caught.value)) < 400

    def forbidden(path: Path) -> os.stat_result:  # the tests may run as root, who may read all
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", forbidden)
    with pytest.raises(ModelNotFound, match=rf"^{tmp_path}: Permission denied: give a directory"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["org/a--b", "org/a..b", "org/a.git", "org/" + 200 * "a"])
def test_a_name_that_the_hub_takes_for_none_is_refused(name: str):
    with pytest.raises(ModelNotFound, match=r"cannot be a Hub id"):
        resolve_model(name)


def test_a_cache_that_cannot_be_written_is_not_called_a_missing_network(
    hub: FakeHub, tmp_path: Path
):
    (tmp_path / "file").touch()
    code, _, errors = pull(hub, tmp_path / "file" / "cache", "org/model")
    assert code == 2 and "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert f"the cache {tmp_path}/file/cache/hub cannot be written" in line and "HF_HOME" in line


def test_pull_fetches_what_cannot_run_code_and_nothing_else(hub: FakeHub, tmp_path: Path):
    code, folder, errors = pull(hub, tmp_path, "org/model")
    assert code == 0, errors
    assert set(hub.fetched) == SAFE
    for name in SAFE:
        assert (Path(folder) / name).read_bytes() == FILES[name]


def test_a_hub_that_does_not_tell_sizes_in_time_delays_nothing(hub: FakeHub, tmp_path: Path):
    hub.holds_sizes = True
    code, folder, errors = pull(hub, tmp_path, "org/model")
    assert code == 0, errors
    assert (Path(folder) / "config.json").is_file()


def test_a_pulled_model_is_found_without_a_network(hub: FakeHub, tmp_path: Path):
    _, folder, _ = pull(hub, tmp_path, "org/model")
    hub.status = 503
    assert pull(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1")[:2] == (0, folder)


@pytest.mark.parametrize(
    ("status", "code", "words", "expected"),
    [
        (401, "RepoNotFound", (), "the Hub has no such model, or it is private"),
        (403, "GatedRepo", (), "accept the terms on the model's page, then set HF_TOKEN"),
        (404, "RevisionNotFound", ("--revision", "old"), "no revision old: check --revision"),
        (500, "", (), "run `wavefill pull org/model` where there is a network"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(
    hub: FakeHub, tmp_path: Path, status: int, code: str, words: tuple[str, ...], expected: str
):
    hub.status, hub.code = status, code
    exit_code, _, errors = pull(hub, tmp_path, "org/model", *words)
    assert exit_code == 2
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and expected in lines[0], errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("address", ["", "hub.example", "ftp://hub.example", "https://"])
def test_an_address_that_is_none_of_a_hub_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, address: str
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    with pytest.raises(ModelNotFound, match=r"^org/model cannot be .* HF_ENDPOINT to ") as refused:
        resolve_model("org/model")
    assert repr(address) in str(refused.value) and "unset it" in str(refused.value)


def test_an_empty_address_of_the_hub_ends_with_a_sentence(hub: FakeHub, tmp_path: Path):
    code, _, errors = pull(hub, tmp_path, "org/model", HF_ENDPOINT="")
    assert code == 2 and "Traceback" not in errors
    assert "the environment sets HF_ENDPOINT to ''" in errors
    _, folder, _ = pull(hub, tmp_path, "org/model")
    offline = {"HF_ENDPOINT": "", "HF_HUB_OFFLINE": "1"}
    assert pull(hub, tmp_path, "org/model", **offline)[:2] == (0, folder), "it asks no Hub"


def test_offline_without_the_model_says_what_to_do(hub: FakeHub, tmp_path: Path):
    code, _, errors = pull(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert code == 2
    assert "error: org/model: neither a directory nor in the local cache" in errors
    assert hub.fetched == []


def test_a_download_without_a_terminal_logs_its_progress(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("server.cli.download_progress.LOG_SECONDS", 0.0)
    bars = progress_bars(DownloadProgress("org/model", lambda: 0, None))
    with caplog.at_level("INFO"), bars(total=9 << 20, unit="B") as bar:
        bar.update(3 << 20)
    assert "org/model: 3 of 9 MiB are here" in caplog.messages
