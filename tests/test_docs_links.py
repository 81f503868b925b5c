"""Links between the documents lead somewhere: to a file that exists and a heading that it has."""

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
