"""The files of the pages as the server sends them; tests/pages has what they do in a browser."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from server.apis.openai.chat_schema import ChatRequest
from server.pages.assets import FOLDER, asset, names
from server.pages.routes import wants_html
from tests.support.server.fake_engine import FakeServer, fake_server

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
PLAYGROUND = FOLDER / "playground"
FOLDERS = ("playground", "dashboard", "common")  # of our own files
OWN_FILES = sorted(
    path for name in FOLDERS for path in (FOLDER / name).rglob("*") if path.is_file()
)
# What a page takes from elsewhere.
BORROWED = {
    "playground": {"pages/common/colours.css", "pages/vendor/marked.esm.js"},
    "dashboard": {
        "pages/common/colours.css",
        "pages/playground/icon.svg",
        "pages/playground/view/dom.js",
        "pages/playground/view/key.js",
    },
}
MODULES = [path for path in OWN_FILES if path.suffix == ".js"]
# Names of formats, which nothing fetches, and what a comment of a library's names.
NAMES = (
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1998/Math/MathML",
    "https://github.com/markedjs/marked",
)
# Fields of a request that are no parameters of an answer, or that the page sets itself.
NOT_OFFERED = {
    "model", "messages", "stream", "stream_options", "logprobs", "timings", "structured_outputs",
    "max_completion_tokens", "logprob_token_ids", "prompt_logprobs", "return_token_ids",
    "return_tokens_as_token_ids", "add_generation_prompt", "continue_final_message", "prediction",
    "user", "service_tier", "store", "metadata", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options",
}  # fmt: skip


def page(fake: FakeServer, path: str = "/") -> httpx.Response:
    return httpx.get(f"{fake.url}{path}", headers={"accept": BROWSER})


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(tmp_path, api_keys=("a-key",)) as server:
        yield server


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML ; charset=utf-8", True),
        ("application/json, text/html;q=0.1", True),
        ("text/html;q=0, */*", False),
        ("text/html; q=0.000", False),
        ("*/*", False),
        ("text/*", False),
        ("text/plain", False),
        ("application/xhtml+xml", False),
        ("", False),
    ],
)
def test_html_goes_only_to_who_names_it(fake: FakeServer, accept: str, html: bool):
    assert wants_html(accept) is html
    answer = httpx.get(f"{fake.url}/", headers={"accept": accept})
    assert answer.status_code == 200
    assert "accept" in answer.headers["vary"]
    if html:
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.text.startswith("<!doctype html>")
    else:
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.text == "Wavefill is running: see /docs\n"


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_the_policy_allows_our_own_files_and_nothing_else(fake: FakeServer, path: str):
    headers = page(fake, path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "font-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_page_and_its_files_need_no_key_and_the_api_does(locked: FakeServer):
    assert page(locked).status_code == page(locked, "/dashboard").status_code == 200
    for name in names():
        assert httpx.get(f"{locked.url}/pages/{name}").status_code == 200, name
    for path in (
        "/v1/models",
        "/pages",
        "/metrics",
        "/dashboard/events",
        "//",
        "/pages/../v1/models",
    ):
        answer = httpx.get(f"{locked.url}{path}", headers={"accept": BROWSER})
        assert answer.status_code == 401, path


@pytest.mark.parametrize(
    "name",
    [
        "routes.py", "vendor/README.md", "vendor/LICENSE.temml", "nothing.js", "",
        "../app.py", "..%2fapp.py", "playground/%2e%2e/routes.py", "/etc/passwd", "playground",
    ],
)  # fmt: skip
def test_only_the_files_of_the_pages_are_sent(fake: FakeServer, name: str):
    assert httpx.get(f"{fake.url}/pages/{name}").status_code == 404


def test_a_file_is_compressed_for_who_takes_that_and_sent_once(fake: FakeServer):
    url = f"{fake.url}/pages/playground/main.js"
    body = (PLAYGROUND / "main.js").read_bytes()
    with httpx.stream("GET", url, headers={"accept-encoding": "gzip"}) as packed:
        raw = b"".join(packed.iter_raw())
        assert packed.headers["content-encoding"] == "gzip"
    plain = httpx.get(url, headers={"accept-encoding": "identity"})
    assert gzip.decompress(raw) == plain.content == body
    assert plain.headers["content-type"] == "text/javascript; charset=utf-8"
    again = httpx.get(url, headers={"if-none-match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", sorted(BORROWED))
def test_a_page_names_every_module_so_that_none_waits_for_another(name: str):
    html = (FOLDER / name / "index.html").read_text()
    named = set(re.findall(r'(?:href|src)="(pages/[^"]+)"', html))
    own = {path.relative_to(FOLDER).as_posix() for path in OWN_FILES if path.suffix != ".html"}
    expected = {f"pages/{path}" for path in own if path.startswith(f"{name}/")}
    assert named == expected | BORROWED[name]


def test_imports_lead_to_files_that_are_there():
    for path in MODULES:
        found = re.findall(r'(?:from |import\()"([^"]+)"', path.read_text())
        for name in found:
            assert name.startswith("."), f"{path.name} imports {name}"
            assert (path.parent / name).resolve().is_file(), f"{path.name} imports {name}"


def test_no_file_names_another_host():
    for name in names():
        if name.endswith(".woff2"):
            continue
        text = (FOLDER / name).read_text()
        for known in NAMES:
            text = text.replace(known, "")
        # marked puts http:// in front of addresses that begin with www.
        found = re.findall(r"""https?://[^"'`\s]+|["'(]//\w[^"'`\s]+""", text)
        assert found == [], name


def test_no_own_file_has_inline_script_or_parses_html():
    banned = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\(|new Function"
    for path in MODULES:
        assert re.findall(banned, path.read_text()) == [], path.name
    for name in BORROWED:
        html = (FOLDER / name / "index.html").read_text()
        assert (
            re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:", html) == []
        ), name


def test_every_parameter_of_a_request_is_offered():
    text = (PLAYGROUND / "chat" / "parameters.js").read_text()
    offered = set(re.findall(r'^ {6}(?:\w+\(|\{ name: )"([a-z_]+)"', text, re.MULTILINE))
    assert set(ChatRequest.model_fields) - NOT_OFFERED == offered


def test_vendored_files_are_those_of_the_packages():
    table = (FOLDER / "vendor" / "README.md").read_text()
    listed = dict(re.findall(r"^\| `([\w.-]+)` .* `([0-9a-f]{64})` \|$", table, re.MULTILINE))
    files = {name.removeprefix("vendor/") for name in names() if name.startswith("vendor/")}
    assert set(listed) == files
    for name, digest in listed.items():
        body = (FOLDER / "vendor" / name).read_bytes()
        if name == "temml.min.js":
            body = body.removesuffix(b"\nexport default temml;\n")
        assert hashlib.sha256(body).hexdigest() == digest, name


@pytest.mark.parametrize(("left_out", "most"), [("dashboard/", 400_000), ("vendor/", 250_000)])
def test_a_page_is_small(left_out: str, most: int):
    """The playground is all but the dashboard; the dashboard needs no library."""
    whole = [asset(name) for name in names() if not name.startswith(left_out)]
    assert sum(len(each.body) for each in whole) < most
    assert sum(len(each.compressed or each.body) for each in whole) < most // 2


def test_the_files_are_small():
    assert [path.name for path in OWN_FILES if len(path.read_text().splitlines()) > 300] == []
    folders = {path.parent for path in OWN_FILES}
    assert all(sum(each.is_file() for each in folder.iterdir()) <= 15 for folder in folders)
