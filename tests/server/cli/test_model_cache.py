"""`wavefill ls` and `wavefill rm`: what is in the cache, and that nothing else is removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.cli.main import UsageError
from server.cli.model_cache import ago, find, mark_used, size
from tests.support.cli.pseudo_terminal import pseudo_terminal

WAVEFILL = Path(sys.executable).parent / "wavefill"
DAY = 86400


def add_model(home: Path, name: str, *, days: int, weights: str = "model.safetensors") -> Path:
    """A model as the Hub's library stores it, used `days` days ago."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = f"{7:040x}"  # a copy of a model has the commits of the original
    snapshot = folder / "snapshots" / commit
    for each in (snapshot, folder / "blobs", folder / "refs"):
        each.mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for index, file in enumerate(("config.json", weights)):
        blob = folder / "blobs" / f"{index}"
        blob.write_bytes(bytes(2048))
        then = time.time() - days * DAY - 60
        os.utime(blob, (then, then))
        (snapshot / file).symlink_to(f"../../blobs/{index}")
    return folder


def wavefill(home: Path, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HOME": str(home)}
    return subprocess.run(
        [WAVEFILL, *words], capture_output=True, text=True, timeout=60, env=environment, **options
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    add_model(tmp_path, "org/old", days=70)
    add_model(tmp_path, "org/new", days=2)
    add_model(tmp_path, "org/pickle", days=400, weights="pytorch_model.bin")
    (tmp_path / "hub" / "datasets--org--data" / "snapshots").mkdir(parents=True)
    return tmp_path


def test_one_model_is_not_called_models(tmp_path: Path):
    add_model(tmp_path, "org/only", days=2)
    assert wavefill(tmp_path, "ls").stdout.splitlines()[-1].startswith("1 model, ")


def test_models_are_listed_with_sizes_and_uses_the_last_used_first(home: Path):
    lines = wavefill(home, "ls").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "org/new", "org/old", "org/pickle", "3"]
    assert "4.0 KiB" in lines[1] and "2 days ago" in lines[1]
    assert "2 months ago" in lines[2] and "1 year ago" in lines[3]
    assert lines[3].endswith("(no safetensors)")
    assert wavefill(home, "ls", "--names").stdout == "org/new\norg/old\norg/pickle\n"
    assert lines[4] == f"3 models, 12.0 KiB in {home / 'hub'}"
    found = json.loads(wavefill(home, "ls", "--json").stdout)["models"]
    assert (found[0]["name"], found[0]["bytes"]) == ("org/new", 4096)
    assert [each["servable"] for each in found] == [True, True, False]


def test_an_empty_cache_says_how_to_fill_it(tmp_path: Path):
    done = wavefill(tmp_path, "ls")
    assert done.returncode == 0 and "wavefill pull HUB_ID" in done.stdout
    assert json.loads(wavefill(tmp_path, "ls", "--json").stdout)["models"] == []


def test_only_the_named_models_are_removed(home: Path):
    done = wavefill(home, "rm", "org/old", "org/old", "org/pickle", "--yes")
    assert done.returncode == 0, done.stderr
    assert "removed, 8.0 KiB freed" in done.stdout
    left = sorted(path.name for path in (home / "hub").iterdir() if "--" in path.name)
    assert left == ["datasets--org--data", "models--org--new"]


def test_without_a_terminal_nothing_is_removed_without_yes(home: Path):
    done = wavefill(home, "rm", "org/old", input="y\n")
    assert done.returncode == 2 and "add --yes" in done.stderr
    assert (home / "hub" / "models--org--old").exists()


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("", False), ("n", False)])
def test_on_a_terminal_it_asks_first(home: Path, answer: str, gone: bool):
    with pseudo_terminal((WAVEFILL, "rm", "org/old"), HF_HOME=str(home)) as terminal:
        terminal.wait_for("Remove this model? [y/N] ")
        assert (home / "hub" / "models--org--old").exists()
        terminal.type(f"{answer}\n")
        assert terminal.wait() == (0 if gone else 1)
    assert (home / "hub" / "models--org--old").exists() is not gone
    assert ("nothing was removed" in terminal.text) is not gone


def test_a_name_that_is_not_there_removes_nothing_and_names_the_nearest(home: Path):
    done = wavefill(home, "rm", "org/new", "org/oldd", "--yes")
    assert done.returncode == 2 and "did you mean org/old?" in done.stderr
    assert (home / "hub" / "models--org--new").exists()
    with pytest.raises(UsageError, match="`wavefill ls` lists"):
        find([], ["a/b"])


def test_a_use_is_noted_although_the_file_system_does_not(home: Path):
    [snapshot] = (home / "hub" / "models--org--old" / "snapshots").iterdir()
    before = (snapshot / "config.json").stat()
    mark_used(snapshot)
    after = (snapshot / "config.json").stat()
    assert after.st_atime > before.st_atime + DAY and after.st_mtime == before.st_mtime
    assert "just now" in wavefill(home, "ls").stdout.splitlines()[1]
    mark_used(home / "none")


def test_sizes_and_times_are_short():
    assert [size(n) for n in (0, 5 << 20, 3 << 30)] == ["0.0 KiB", "5.0 MiB", "3.0 GiB"]
    assert [ago(s) for s in (5, 300, 3600, 90_000)] == [
        *("just now", "5 min ago", "1 hour ago", "1 day ago"),
    ]
