"""The errors of wrong uploads, wrong batches and wrong lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from tests.support.server.batch_server import CHAT, BatchServer, batch_server, line

BOUNDARY = {"content-type": "multipart/form-data; boundary=b"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory):
    """One for all: no wrong input changes what the next one meets."""
    folder = tmp_path_factory.mktemp("batches")
    async with batch_server(folder, max_file_bytes=20_000, max_body_bytes=4000) as server:
        server.run_batches()
        yield server


def part(name: str, value: str, **options: str) -> str:
    shown = "".join(f'; {key}="{text}"' for key, text in options.items())
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n{value}\r\n'


FILE = part("file", "{}", filename="a")
PURPOSE = part("purpose", "batch")
END = "--b--\r\n"
CREATED = part("expires_after[anchor]", "created_at")

WRONG_FORMS = [
    # body, status, code, param, a word of the message
    (FILE + END, 400, "missing_required_parameter", "purpose", "add it"),
    (PURPOSE + END, 400, "missing_required_parameter", "file", "add it"),
    (END, 400, "missing_required_parameter", "purpose", "add it"),
    (FILE + part("purpose", "poetry") + END, 400, "invalid_value", "purpose", "'user_data'"),
    (FILE + part("purpose", "batch_output") + END, 400, "invalid_value", "purpose", "must be"),
    (FILE + FILE + PURPOSE + END, 400, "invalid_value", "file", "twice"),
    (FILE + PURPOSE + PURPOSE + END, 400, "invalid_value", "purpose", "twice"),
    (FILE + PURPOSE + part("colour", "red") + END, 400, "unknown_parameter", "colour", "remove"),
    (FILE + PURPOSE + part("purpos", "batch") + END, 400, "unknown_parameter", "purpos", "mean"),
    (part("file", "", filename="a") + PURPOSE + END, 400, "invalid_value", "file", "empty"),
    (
        part("file", "x" * 20_001, filename="a") + PURPOSE + END,
        *(400, "file_too_large", "file", "--max-file-bytes"),
    ),
    (part("purpose", "x" * 1025) + FILE + END, 400, "invalid_value", "purpose", "1024"),
    (
        FILE + PURPOSE + CREATED + END,
        *(400, "missing_required_parameter", "expires_after.seconds", "add it"),
    ),
    (
        FILE + PURPOSE + CREATED + part("expires_after[seconds]", "3599") + END,
        *(400, "invalid_value", "expires_after.seconds", "at least 3600"),
    ),
    (
        FILE + PURPOSE + CREATED + part("expires_after[seconds]", "2592001") + END,
        *(400, "invalid_value", "expires_after.seconds", "at most 2592000"),
    ),
    (
        FILE + PURPOSE + CREATED + part("expires_after[seconds]", "soon") + END,
        *(400, "invalid_type", "expires_after.seconds", "integer"),
    ),
    (
        FILE + PURPOSE + part("expires_after[anchor]", "now") + END,
        *(400, "invalid_value", "expires_after.anchor", "created_at"),
    ),
    (FILE + PURPOSE + part("expires_after", "1") + END, 400, "invalid_type", "expires_after", "an"),
    (
        FILE + PURPOSE + part("expires_after", "1") + CREATED + END,
        *(400, "invalid_value", "expires_after", "twice"),
    ),
    (FILE + PURPOSE, 400, "invalid_multipart", None, "last boundary"),
    ("", 400, "invalid_multipart", None, "last boundary"),
    ("hello" + FILE + END, 400, "invalid_multipart", None, "begin"),
    ("--b\r\n\r\nx\r\n" + END, 400, "invalid_multipart", None, "Content-Disposition"),
    ("--bad\r\n" + END, 400, "invalid_multipart", None, "end of its line"),
    (part("a" * 9000, "x") + END, 400, "invalid_multipart", None, "8192"),
    (part("purpose", "\udcff") + FILE + END, 400, "invalid_value", "purpose", "UTF-8"),
    ("".join(part(f"f{n}", "") for n in range(17)) + END, 400, "invalid_multipart", None, "16"),
]


@pytest.mark.parametrize(("body", "status", "code", "param", "word"), WRONG_FORMS)
async def test_a_wrong_upload_gets_an_error_that_says_what_to_change(
    server: BatchServer, body: str, status: int, code: str, param: str | None, word: str
):
    content = body.encode("utf-8", "surrogateescape")
    answer = await server.http.post("/v1/files", content=content, headers=BOUNDARY)
    assert_error(answer, status, code, param, word)


WRONG_TYPES = [
    ("application/json", 415, "unsupported_media_type", "multipart/form-data"),
    ("", 415, "unsupported_media_type", "not given"),
    ("multipart/form-data", 400, "invalid_multipart", "boundary"),
    ("multipart/form-data; boundary=", 400, "invalid_multipart", "boundary"),
    ('multipart/form-data; boundary="a\tb"', 400, "invalid_multipart", "boundary"),
    (f"multipart/form-data; boundary={'b' * 71}", 400, "invalid_multipart", "boundary"),
]


@pytest.mark.parametrize(("kind", "status", "code", "word"), WRONG_TYPES)
async def test_a_wrong_kind_of_upload_gets_an_error_that_says_what_to_send(
    server: BatchServer, kind: str, status: int, code: str, word: str
):
    headers = {"content-type": kind} if kind else {}
    content = (FILE + PURPOSE + END).encode()
    answer = await server.http.post("/v1/files", content=content, headers=headers)
    assert_error(answer, status, code, None, word)


def assert_error(answer: Any, status: int, code: str, param: str | None, word: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert word in error["message"]


WRONG_ROUTES = [
    ("GET", "/v1/files/file-none", 404, "file_not_found", None, "GET /v1/files"),
    ("GET", "/v1/files/file-none/content", 404, "file_not_found", None, "no file"),
    ("DELETE", "/v1/files/file-none", 404, "file_not_found", None, "no file"),
    ("GET", "/v1/files/..%2Fwavefill.sqlite3/content", 404, "not_found", None, "no route"),
    ("GET", "/v1/files?limit=0", 400, "invalid_value", "limit", "from 1 to 10000"),
    ("GET", "/v1/files?limit=10001", 400, "invalid_value", "limit", "from 1 to 10000"),
    ("GET", "/v1/files?limit=ten", 400, "invalid_type", "limit", 'is "ten": it must be an integer'),
    ("GET", "/v1/files?limit=", 400, "invalid_type", "limit", "leave it out for 10000"),
    ("GET", "/v1/files?limit=1e2", 400, "invalid_type", "limit", "from 1 to 10000"),
    ("GET", "/v1/files?limit=1&limit=2", 400, "invalid_value", "limit", "2 times"),
    ("GET", "/v1/files?after=4", 400, "invalid_value", "after", "last_id"),
    ("GET", "/v1/files/file-none?limit=3", 400, "unknown_parameter", "limit", "remove"),
    ("GET", "/v1/files?order=up", 400, "invalid_value", "order", "'asc'"),
    ("GET", "/v1/files?purpose=fun", 400, "invalid_value", "purpose", "must be"),
    ("GET", "/v1/files?after=file-none", 400, "invalid_value", "after", "last_id"),
    ("GET", "/v1/files?colour=red", 400, "unknown_parameter", "colour", "remove"),
    ("GET", "/v1/batches/batch_none", 404, "batch_not_found", None, "GET /v1/batches"),
    ("POST", "/v1/batches/batch_none/cancel", 404, "batch_not_found", None, "no batch"),
    ("GET", "/v1/batches?limit=101", 400, "invalid_value", "limit", "from 1 to 100"),
    ("GET", "/v1/batches?limit=many", 400, "invalid_type", "limit", "leave it out for 20"),
    ("GET", "/v1/batches?after=batch_none", 400, "invalid_value", "after", "last_id"),
    ("GET", "/v1/batches?purpose=batch", 400, "unknown_parameter", "purpose", "remove"),
    ("DELETE", "/v1/batches/batch_none", 405, "method_not_allowed", None, "DELETE"),
]


@pytest.mark.parametrize(("method", "path", "status", "code", "param", "word"), WRONG_ROUTES)
async def test_a_wrong_query_gets_an_error_that_says_what_to_change(
    server: BatchServer,
    method: str,
    path: str,
    status: int,
    code: str,
    param: str | None,
    word: str,
):
    assert_error(await server.http.request(method, path), status, code, param, word)


ID = "ID OF THE FILE"
BATCH = {"input_file_id": ID, "endpoint": CHAT, "completion_window": "24h"}
LONG = {"anchor": "created_at", "seconds": 3600}
WRONG_BATCHES = [
    ({"input_file_id": None}, 400, "invalid_type", "input_file_id", "string"),
    ({"input_file_id": "file-none"}, 404, "file_not_found", "input_file_id", "no file"),
    ({"input_file_id": "x" * 65}, 400, "invalid_value", "input_file_id", "at most 64"),
    ({"endpoint": "/v1/moderations"}, 400, "invalid_value", "endpoint", "/v1/completions"),
    ({"endpoint": "v1/completions"}, 400, "invalid_value", "endpoint", "must be one of"),
    ({"endpoint": 3}, 400, "invalid_type", "endpoint", "string"),
    ({"completion_window": "1h"}, 400, "invalid_value", "completion_window", "'24h'"),
    ({"metadata": {"a": 1}}, 400, "invalid_type", "metadata.a", "string"),
    ({"metadata": {"a": "x" * 513}}, 400, "invalid_value", "metadata.a", "at most 512"),
    ({"metadata": {"x" * 65: ""}}, 400, "invalid_value", f"metadata.{'x' * 64}", "at most 64"),
    (
        {"metadata": {str(n): "" for n in range(17)}},
        *(400, "invalid_value", "metadata", "at most 16"),
    ),
    (
        {"output_expires_after": LONG | {"seconds": 1}},
        *(400, "invalid_value", "output_expires_after.seconds", "at least 3600"),
    ),
    (
        {"output_expires_after": LONG | {"anchor": "now"}},
        *(400, "invalid_value", "output_expires_after.anchor", "created_at"),
    ),
    ({"priority": 1}, 400, "unknown_parameter", "priority", "remove"),
]


@pytest.mark.parametrize(("changes", "status", "code", "param", "word"), WRONG_BATCHES)
async def test_a_wrong_batch_gets_an_error_that_says_what_to_change(
    server: BatchServer, changes: Any, status: int, code: str, param: str, word: str
):
    body = BATCH | {"input_file_id": await server.upload(line("a"))} | changes
    answer = await server.http.post("/v1/batches", json=body)
    assert_error(answer, status, code, param, word)


@pytest.mark.parametrize("name", BATCH)
async def test_each_field_of_a_batch_is_required(server: BatchServer, name: str):
    body = {key: value for key, value in BATCH.items() if key != name}
    answer = await server.http.post("/v1/batches", json=body)
    assert_error(answer, 400, "missing_required_parameter", name, "add it")


async def test_a_file_for_something_else_makes_no_batch(server: BatchServer):
    body = BATCH | {"input_file_id": await server.upload(line("a"), "user_data")}
    answer = await server.http.post("/v1/batches", json=body)
    assert_error(answer, 400, "invalid_purpose", "input_file_id", "'batch'")


def changed(**fields: object) -> str:
    return json.dumps(json.loads(line("b")) | fields)


def without(name: str) -> str:
    return json.dumps({key: v for key, v in json.loads(line("b")).items() if key != name})


WRONG_LINES = [
    # line 2 of a file, code, param, a word of the message
    ("{", "invalid_json_line", None, "the line is not valid JSON"),
    ("[]", "invalid_json_line", None, "the line is a JSON array"),
    ("null", "invalid_json_line", None, "null"),
    ('{"a": NaN}', "invalid_json_line", None, "JSON"),
    (line("b").strip() + line("c").strip(), "invalid_json_line", None, "JSON"),
    ("[" * 70 + "]" * 70, "invalid_json_line", None, "the line is nested deeper than 64 levels"),
    ("\udcff", "invalid_json_line", None, "the line is not valid UTF-8"),
    (without("custom_id"), "missing_required_parameter", "custom_id", "add it"),
    (without("method"), "missing_required_parameter", "method", "add it"),
    (without("url"), "missing_required_parameter", "url", "add it"),
    (without("body"), "missing_required_parameter", "body", "add it"),
    (changed(custom_id=7), "invalid_custom_id", "custom_id", "string"),
    (changed(custom_id=""), "invalid_custom_id", "custom_id", "1 to 512"),
    (changed(custom_id="x" * 513), "invalid_custom_id", "custom_id", "1 to 512"),
    (line("a").strip(), "duplicate_custom_id", "custom_id", "'a'"),
    (changed(method="GET"), "invalid_method", "method", "POST"),
    (changed(method="post"), "invalid_method", "method", "POST"),
    (changed(url="/v1/completions"), "invalid_url", "url", CHAT),
    (changed(url=None), "invalid_url", "url", "null"),
    (changed(url=f"http://test{CHAT}"), "invalid_url", "url", CHAT),
    (changed(body=[]), "invalid_type", "body", "array"),
    (changed(body="{}"), "invalid_type", "body", "string"),
    (changed(extra=1), "unknown_parameter", "extra", "remove"),
    (line("b", user="x" * 4000).strip(), "line_too_long", None, "4000 bytes"),
]


@pytest.mark.parametrize(("wrong", "code", "param", "word"), WRONG_LINES)
async def test_a_wrong_line_fails_the_batch_and_is_named(
    server: BatchServer, wrong: str, code: str, param: str | None, word: str
):
    server.engine.requests.clear()
    content = line("a") + wrong + "\n" + line("z")
    made = await server.create(content.encode("utf-8", "surrogateescape"))
    batch = await server.until(made["id"])
    assert batch["status"] == "failed"
    assert batch["failed_at"] is not None
    assert batch["output_file_id"] is None is batch["error_file_id"]
    (error,) = batch["errors"]["data"]
    assert (error["line"], error["code"], error["param"]) == (2, code, param)
    assert word in error["message"]
    assert server.engine.requests == []


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        ("\n\n \n", "empty_file", None),
        ("\ufeff\n", "empty_file", None),
        ("\n" * 900 + "{", "invalid_json_line", 901),
        ("{}\n" * 500, "missing_required_parameter", 1),
    ],
)
async def test_a_wrong_file_fails_the_batch(
    server: BatchServer, content: str, code: str, number: int | None
):
    batch = await server.until((await server.create(content))["id"])
    assert batch["status"] == "failed"
    errors = batch["errors"]["data"]
    assert (errors[0]["code"], errors[0]["line"]) == (code, number)
    assert len(errors) <= 100


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
NO_IMAGES = (400, "unsupported_parameter", "messages[0].content[0].type", "image")
WRONG_BODIES = [
    # fields of a body, status, code, param, a word of the message
    ({"stream": True}, 400, "unsupported_parameter", "stream", "not streamed"),
    ({"priority": 3}, 400, "unsupported_parameter", "priority", "after all"),
    ({"model": "gpt-9"}, 404, "model_not_found", "model", "`fake`"),
    ({"messages": []}, 400, "invalid_value", "messages", "at least 1"),
    ({"messages": None}, 400, "invalid_type", "messages", "array"),
    ({"temperature": 3}, 400, "invalid_value", "temperature", "at most 2"),
    ({"temprature": 1}, 400, "unknown_parameter", "temprature", "temperature"),
    ({"max_tokens": 10**6}, 400, "context_length_exceeded", "messages", "256"),
    ({"stream": "yes"}, 400, "unsupported_parameter", "stream", "not streamed"),
    ({"n": 129}, 400, "invalid_value", "n", "at most 128"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, *NO_IMAGES),
]


async def test_a_wrong_body_fails_its_line_only(server: BatchServer):
    content = "".join(line(str(index), **wrong[0]) for index, wrong in enumerate(WRONG_BODIES))
    made = await server.create(line("good") + content + line("better"))
    batch = await server.until(made["id"])
    assert batch["status"] == "completed"
    wrong = len(WRONG_BODIES)
    assert batch["request_counts"] == {"total": 2 + wrong, "completed": 2, "failed": wrong}
    good = await server.records(batch["output_file_id"])
    assert {record["custom_id"] for record in good} == {"good", "better"}
    for record in await server.records(batch["error_file_id"]):
        _, status, code, param, word = WRONG_BODIES[int(record["custom_id"])]
        assert record["error"] is None
        assert record["response"]["status_code"] == status
        error = record["response"]["body"]["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert word in error["message"]
