"""What the documents quote is what the code says: texts of errors, options of the command."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from server.cli.commands import serve
from server.cli.main import Parser
from server.cli.vllm_flags import REMEDIES
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PACKAGES = ("server", "runtime", "model_zoo")
OPTION = re.compile(r"`(--?[a-z-]+)")
GAP = "\0"  # what differs from case to case


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """Every string of the code, with `GAP` where a value is put in."""
    found: list[str] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
                    found.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"\{[\w.:]*\}|%[ds]", GAP, node.value))
    return tuple(found)


def is_in_the_code(quoted: str) -> bool:
    """Whether one string of the code has the parts of a quotation, in order."""
    parts = [part for part in quoted.split("…") if part.strip()]
    pattern = re.compile(".*?".join(re.escape(part) for part in parts), re.DOTALL)
    return any(pattern.search(text) for text in texts_of_the_code())


def quotations() -> list[str]:
    """The first code span of each row, after a status if there is one."""
    lines = (DOCS / "troubleshooting.md").read_text("utf-8").splitlines()
    end = lines.index("## It answers, but slowly or not as expected")
    rows = [re.match(r"\| (?:\d{3} )?`([^`]+)` \|", line) for line in lines[:end]]
    return [row[1] for row in rows if row]


@pytest.mark.parametrize("quoted", quotations())
def test_a_text_that_the_troubleshooting_explains_is_in_the_code(quoted: str):
    assert is_in_the_code(quoted)


def test_a_text_that_no_code_has_is_found():
    assert len(quotations()) > 35
    assert not is_in_the_code("the flux capacitor is empty")
    assert not is_in_the_code("being restarted: try again soon … the engine is down")


def options_of_serve() -> set[str]:
    parser = Parser()
    serve.add_arguments(parser)
    return set(parser.options())


@pytest.mark.parametrize("name", ["quickstart", "tune", "troubleshooting", "replicas"])
def test_an_option_that_a_guide_names_is_one_of_wavefill(name: str):
    text = (DOCS / f"{name}.md").read_text("utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    # Of `wavefill plan`, docker and smg.
    of_others = {"--card", "--gpus", "--target", "--prometheus-port"}
    assert set(OPTION.findall(text)) - of_others - options_of_serve() == set()


def section(title: str) -> str:
    text = (DOCS / "migrate.md").read_text("utf-8")
    return text.split(f"## From {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("title", ["vLLM", "SGLang", "llama.cpp"])
def test_options_that_are_the_same_there_exist_here(title: str):
    same = section(title).split("| there |")[0]
    options = set(OPTION.findall(same))
    assert len(options) > 4
    assert options - options_of_serve() == set()


@pytest.mark.parametrize("title", ["vLLM", "SGLang", "llama.cpp", "Ollama"])
def test_what_to_write_instead_is_an_option_of_this_server(title: str):
    rows = [line.split("|") for line in section(title).splitlines() if line.startswith("| ")]
    assert len(rows) > 8
    for _, theirs, ours, _ in rows:
        assert set(OPTION.findall(ours)) - options_of_serve() == set(), theirs


def test_the_tables_have_every_option_of_others_and_say_what_the_command_says():
    documented: set[str] = set()
    for title in ("vLLM", "SGLang", "llama.cpp"):
        for line in section(title).splitlines():
            if not line.startswith("| `-"):
                continue
            _, theirs, ours, _ = line.split("|")
            names = [option.lstrip("-") for option in OPTION.findall(theirs)]
            documented |= set(names)
            remedies = " ".join(REMEDIES[name] for name in names)
            said = set(re.findall(r"--[a-z-]+", remedies))
            assert set(OPTION.findall(ours)) == said, theirs
    assert documented == set(REMEDIES)
