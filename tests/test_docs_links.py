"""The documents name what exists: files, folders, modules to run, headings, names of the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "model_zoo/tiny_chat/README.md")
DOCUMENTS = [ROOT / name for name in TOP] + sorted((ROOT / "docs").rglob("*.md"))
CODE = ("server", "runtime", "model_zoo", "attention", "benchmarks", "tests")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")  # https:, mailto:
TREES = (*CODE, "docs", "deploy")
OLD_NAMES = {ROOT / "CHANGELOG.md"}  # it says what had them
RUN = re.compile(r"python3? -m ([\w.]+\w)")
FILE = re.compile(r"(?<![\w/.:-])[\w.][\w./-]*\.(?:py|md|sh|yml|yaml|toml|svg)\b")
IN_TREE = re.compile(rf"(?<![\w/.-])(?:{'|'.join(TREES)})/[\w./-]*")
FOLDER = re.compile(r"`(\w[\w./-]*/)`")
NAME = re.compile(r"`((?:[A-Z]\w*[a-z]|[a-z]+_)\w*)(?:\.(\w+))?(?:\(\))?`")  # as code has them


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text("utf-8")), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        repeated = (f"{words}-{count}" for count in range(1, 100))
        found.add(next(a for a in (words, *repeated) if a not in found))
    return found


def dead(path: Path) -> list[str]:
    found: list[str] = []
    for link in LINK.findall(FENCED.sub("", path.read_text("utf-8"))):
        if ELSEWHERE.match(link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(path: Path):
    assert dead(path) == []


def test_dead_links_are_found(tmp_path: Path):
    file = tmp_path / "a.md"
    file.write_text(
        "# One, two\n\n[1](#one-two) [2](#two) [3](b.md) [4](a.md#one-two) [5](a.md#x)\n"
    )
    assert dead(file) == ["#two", "b.md", "a.md#x"]


def test_every_document_that_the_code_names_exists():
    for package in CODE:
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/.-]+\.md\b", path.read_text("utf-8")):
                assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


@cache
def repository() -> frozenset[str]:
    """Every file and folder of the trees and the root, by path; each end of a path, too."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    for tree in TREES:
        paths += [ROOT / tree, *(ROOT / tree).rglob("*")]
    ends: set[str] = set()
    for path in paths:
        parts = path.relative_to(ROOT).parts
        ends.update("/".join(parts[start:]) for start in range(len(parts)))
    return frozenset(ends)


def missing(path: Path) -> list[str]:
    """Files, folders and modules that a document names and that do not exist."""
    text = path.read_text("utf-8")
    names = {*FILE.findall(text), *IN_TREE.findall(text), *FOLDER.findall(text)}
    found = {
        name
        for name in names
        if name.rstrip("/.") not in repository() and not (path.parent / name).exists()
    }
    modules = {name for name in RUN.findall(text) if name.split(".")[0] in CODE}
    found |= {name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()}
    return sorted(found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_folder_and_module_that_a_document_names_exists(path: Path):
    assert path in OLD_NAMES or missing(path) == []


def test_missing_names_are_found(tmp_path: Path):
    file = tmp_path / "a.md"
    file.write_text(
        "`server/app.py`, `app.py`, `openai/chat.py`, `server/nothing/`, `gone/`, a.md, gone.py\n"
        "python -m server.gone, python -m server.bench.share, deploy/gone.sh https://a/deploy/b.md\n"
    )
    gone = ["deploy/gone.sh", "gone.py", "gone/", "server.gone", "server/nothing/"]
    assert missing(file) == gone


def test_every_name_of_code_in_the_architecture_is_in_the_code():
    sources = [path.read_text("utf-8") for tree in CODE[:4] for path in (ROOT / tree).rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(sources)))
    text = FENCED.sub("", (ROOT / "docs" / "architecture.md").read_text("utf-8"))
    names = {part for name in NAME.findall(text) for part in name if part}
    assert len(names) > 50
    assert names - words - {"TYPE_CHECKING"} == set()
