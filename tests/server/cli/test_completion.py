"""`wavefill completion`: what Tab adds, in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli.pseudo_terminal import pseudo_terminal

WAVEFILL = Path(sys.executable).parent / "wavefill"
# Calls the function that completes, as bash does when Tab is pressed.
PRESS_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_wavefill wavefill "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
CASES = [
    ("wavefill be", ["bench"]),
    ("wavefill bench ", ["compare", "serve", "sweep"]),
    ("wavefill serve --max-q", ["--max-queue"]),
    ("wavefill serve --no-pref", ["--no-prefix-cache"]),
    ("wavefill serve --dtype ", ["auto", "bfloat16", "float16", "float32"]),
    ("wavefill plan --kv-dtype fp8", ["fp8_e4m3"]),
    ("wavefill bench sweep --endpoint ch", ["chat"]),
    ("wavefill completion ", ["bash", "fish", "zsh"]),
    ("wavefill serve --memory-f", []),  # an old name, which is refused
    ("wavefill rm ", ["org/model"]),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run([WAVEFILL, "completion", shell], capture_output=True, check=True)
        (folder / shell).write_bytes(done.stdout)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With one downloaded model, and our command in front."""
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / f"{7:040x}"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    path = f"{WAVEFILL.parent}{os.pathsep}{os.environ['PATH']}"
    return {"HF_HOME": str(tmp_path), "PATH": path}


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_completes_commands_options_choices_and_models(
    line: str, expected: list[str], scripts: Path, environment: dict[str, str]
):
    words = ["bash", "-c", PRESS_TAB, "bash", scripts / "bash", *line.split(" ")]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment)
    assert (sorted(done.stdout.split()), done.stderr) == (expected, "")


def test_tab_completes_in_an_interactive_bash(
    scripts: Path, tmp_path: Path, environment: dict[str, str]
):
    (tmp_path / "chat.jinja").touch()
    words = ["bash", "--norc", "--noprofile", "-i"]
    with pseudo_terminal(words, PS1="> ", **environment) as screen:
        screen.type(f"cd {tmp_path}; . {scripts}/bash; echo lo''aded\r")
        screen.wait_for("loaded\r")
        screen.type("wavefill ben\tsw\t--endp\tch\t--js\t")
        screen.wait_for("wavefill bench sweep --endpoint chat --json ")
        screen.type("\x15wavefill serve --chat-t\tch\t")
        screen.wait_for("wavefill serve --chat-template chat.jinja")


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish_completes_the_same(
    line: str, expected: list[str], scripts: Path, environment: dict[str, str]
):
    if shutil.which("fish") is None:
        pytest.skip("needs fish")
    code = f"source {scripts}/fish; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert sorted(entry.split("\t")[0] for entry in done.stdout.splitlines()) == expected


def test_zsh_and_bash_can_parse_their_scripts(scripts: Path):
    for shell in ("zsh", "bash"):
        if shutil.which(shell):
            done = subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")


def test_no_other_command_imports_what_completes():
    code = "import sys\nfrom server.cli.main import main\n"
    code += "try: main(['ls', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'shtab' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
