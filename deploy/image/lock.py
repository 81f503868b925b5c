"""Writes the lock files of the image: every package with its version and the hashes of its files.

    make lock                                 the versions stay what they are, where they can
    make lock ARGS=--upgrade                  the newest that pyproject.toml allows
    make lock CPU="--find-links DIRECTORY"    where PyTorch's CPU build is: also --index URL

Four files, one for each layer of the image that pip fills, and one for what builds our wheel:

    dependencies.txt    what pyproject.toml asks for, without PyTorch: the same in both targets
    torch-cuda.txt      PyTorch, and what only PyTorch needs: CUDA's libraries, Triton, SymPy
    torch-cpu.txt       the same of PyTorch's CPU build
    build.txt           hatchling, which builds our wheel

Hashes are of all files of a version, whatever the platform.  Resolved is for Linux and the oldest
Python that pyproject.toml allows.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
EXTRAS = ("otel",)  # of ours that the image has: nothing can be installed into it later
HEAD = "# Written by `make lock`: see deploy/image/lock.py.\n"

Lock = dict[str, str]  # by the name of the package: its line, with the lines of its hashes


def parse(text: str) -> Lock:
    """The packages of a lock file."""
    blocks = re.findall(r"^([\w.-]+)(==.*(?:\n +--hash=.*)+)", text, re.MULTILINE)
    return {name: name + rest for name, rest in blocks}


def requirements(project: dict) -> tuple[list[str], list[str]]:
    """What the image needs, and which of it is PyTorch."""
    needs = list(project["dependencies"])
    for extra in EXTRAS:
        needs += project["optional-dependencies"][extra]
    torch = [need for need in needs if re.match(r"torch\b", need)]
    return [need for need in needs if need not in torch], torch


class Resolver:
    """Runs uv in a folder of its own."""

    def __init__(self, folder: Path, python: str, options: list[str]) -> None:
        self.folder, self.python, self.options = folder, python, options

    def resolve(self, name: str, needs: list[str], *more: str, constraints: Lock) -> Lock:
        """`needs` and all that they need, with the versions of the file `name` where they fit."""
        source, pins = self.folder / f"{name}.in", self.folder / f"{name}.pins"
        target = self.folder / name
        source.write_text("\n".join(needs) + "\n")
        pins.write_text("".join(block.split()[0] + "\n" for block in constraints.values()))
        before = HERE / name
        target.write_text(before.read_text() if before.exists() else "")
        command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--python-version", self.python]
        command += ["--python-platform", "x86_64-manylinux_2_36", "--no-build"]  # Debian 12's C
        command += ["--constraints", str(pins), "--output-file", str(target)]
        ran = subprocess.run([*command, *self.options, *more, str(source)], text=True)
        if ran.returncode != 0:
            raise SystemExit(f"{name}: uv found no versions, as it says above")
        return parse(target.read_text())


def write(name: str, lock: Lock) -> None:
    (HERE / name).write_text(HEAD + "".join(f"{block}\n" for _, block in sorted(lock.items())))
    print(f"{name}: {len(lock)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument(
        "--cpu",
        default="",
        metavar="OPTIONS",
        help="uv's options for PyTorch's CPU build: --find-links DIRECTORY or --index URL",
    )
    args = parser.parse_args()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needs, torch = requirements(pyproject["project"])
    python = re.findall(r">=(\d+\.\d+)", pyproject["project"]["requires-python"])[0]
    with tempfile.TemporaryDirectory() as folder:
        resolver = Resolver(Path(folder), python, ["--upgrade"] if args.upgrade else [])
        ours = resolver.resolve("dependencies.txt", needs, constraints={})
        cuda = resolver.resolve("torch-cuda.txt", torch, constraints=ours)
        version = cuda["torch"].split()[0].removeprefix("torch==")
        cpu = resolver.resolve(
            "torch-cpu.txt",
            [f"torch=={version}+cpu"],
            "--index-strategy=unsafe-best-match",
            *shlex.split(args.cpu),
            constraints=ours | {name: block for name, block in cuda.items() if name != "torch"},
        )
        build = resolver.resolve("build.txt", pyproject["build-system"]["requires"], constraints={})
    write("dependencies.txt", ours)
    write("torch-cuda.txt", {name: block for name, block in cuda.items() if name not in ours})
    write("torch-cpu.txt", {name: block for name, block in cpu.items() if name not in ours})
    write("build.txt", build)


if __name__ == "__main__":
    sys.exit(main())
