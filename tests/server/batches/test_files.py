"""/v1/files: what is uploaded, listed, read and removed, and by whom."""

from __future__ import annotations

import asyncio
import sqlite3
from itertools import pairwise
from pathlib import Path

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from server.batches.database import BatchDatabase, DataError
from server.batches.files import FileStore
from server.batches.multipart import MultipartReader, boundary_of
from server.errors import NotFound, RateLimited, RequestError
from tests.support.server.batch_server import BatchServer, FakeClock, batch_server
from tests.support.server.failing_commit import fail_commits_of

DAY = 86400


def left_on_disk(server: BatchServer) -> list[str]:
    return sorted(path.name for path in (server.store.database.directory / "files").iterdir())


async def test_openais_client_uploads_reads_lists_and_deletes_a_file(server: BatchServer):
    client = AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=server.http
    )
    made = await client.files.create(
        file=("a.jsonl", b"{}\n"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.filename, made.purpose, made.bytes, made.status) == (
        *("a.jsonl", "batch", 3),
        "processed",
    )
    assert made.expires_at == made.created_at + 3600
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == b"{}\n"
    assert [file.id async for file in client.files.list()] == [made.id]
    assert (await client.files.delete(made.id)).deleted
    assert [file.id async for file in client.files.list()] == []
    assert left_on_disk(server) == []


async def test_a_file_comes_back_byte_for_byte(server: BatchServer):
    content = bytes(range(256)) * 9000 + b"\r\n--\r\n--x\r\n\r\n--"  # over two chunks
    id = await server.upload(content, "user_data")
    answer = await server.http.get(f"/v1/files/{id}/content")
    assert answer.content == content
    assert answer.headers["content-length"] == str(len(content))


async def test_pages_of_a_list_hold_every_file_once(server: BatchServer):
    made = [await server.upload(f"{index}") for index in range(7)]
    for order, expected in (("desc", made[::-1]), ("asc", made)):
        seen: list[str] = []
        query = {"limit": "3", "order": order}
        while True:
            page = (await server.http.get("/v1/files", params=query)).json()
            seen += [file["id"] for file in page["data"]]
            assert page["last_id"] == seen[-1]
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
        assert seen == expected
    await server.upload("x", "user_data")
    page = (await server.http.get("/v1/files", params={"purpose": "user_data"})).json()
    assert [file["purpose"] for file in page["data"]] == ["user_data"]


async def test_a_file_is_gone_when_it_expires(server: BatchServer):
    kept, short = await server.upload("a", "user_data"), await server.upload("b")
    server.clock.now += 30 * DAY
    assert (await server.http.get(f"/v1/files/{short}")).status_code == 404
    page = (await server.http.get("/v1/files")).json()
    assert [file["id"] for file in page["data"]] == [kept]
    server.store.files.sweep()
    assert left_on_disk(server) == [kept]


async def test_files_belong_to_the_key_that_sent_them(tmp_path: Path):
    keys = ("first", "second")
    async with batch_server(tmp_path, key="first", api_keys=keys) as server:
        id = await server.upload("secret")
        other = {"authorization": "Bearer second"}
        for method, path in (
            ("GET", f"/v1/files/{id}"),
            ("GET", f"/v1/files/{id}/content"),
            ("DELETE", f"/v1/files/{id}"),
        ):
            answer = await server.http.request(method, path, headers=other)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")
        page = await server.http.get("/v1/files", headers=other)
        assert page.json()["data"] == []
        body = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await server.http.post("/v1/batches", json=body, headers=other)
        assert answer.status_code == 404
        assert (await server.http.get(f"/v1/files/{id}/content")).text == "secret"


async def test_files_stay_with_their_key_when_a_second_key_is_added(tmp_path: Path):
    async with batch_server(tmp_path, key="first", api_keys=("first",)) as server:
        id = await server.upload("secret")
    async with batch_server(tmp_path, key="first", api_keys=("second", "first")) as server:
        assert (await server.http.get(f"/v1/files/{id}/content")).text == "secret"


async def test_a_refused_upload_leaves_nothing_behind(tmp_path: Path):
    async with batch_server(tmp_path, max_file_bytes=1000) as server:
        for content in (b"x" * 1001, b"x" * 90_000, b""):
            answer = await server.http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("a", content)}
            )
            assert answer.status_code in (400, 413)
        for _ in range(200):
            if not left_on_disk(server) and not num_rows(server):
                break
            await asyncio.sleep(0.01)
        assert left_on_disk(server) == []
        assert num_rows(server) == 0


def num_rows(server: BatchServer) -> int:
    with sqlite3.connect(server.store.database.directory / "wavefill.sqlite3") as connection:
        count = connection.execute("SELECT COUNT(*) FROM files").fetchone()[0]
    connection.close()
    return count


async def test_an_upload_that_breaks_off_leaves_nothing_behind(server: BatchServer):
    async def body():
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield b"x" * 3_000_000
        assert left_on_disk(server)
        raise ConnectionError

    headers = {"content-type": "multipart/form-data; boundary=b"}
    with pytest.raises(ConnectionError):
        await server.http.post("/v1/files", content=body(), headers=headers)
    for _ in range(200):
        if not left_on_disk(server):
            break
        await asyncio.sleep(0.01)
    assert left_on_disk(server) == []


async def test_uploads_at_the_same_time_do_not_share_the_same_room(tmp_path: Path):
    async with batch_server(tmp_path, max_data_bytes=5000) as server:

        async def send() -> int:
            files = {"file": ("a", b"x" * 2000)}
            data = {"purpose": "user_data"}
            return (await server.http.post("/v1/files", data=data, files=files)).status_code

        codes = await asyncio.gather(*(send() for _ in range(6)))
        assert sorted(codes)[:2] == [200, 200]
        assert set(codes[2:]) <= {200, 429}
        assert sum(code == 200 for code in codes) == 2


async def test_without_a_data_directory_the_message_names_the_option(tmp_path: Path):
    async with batch_server(tmp_path) as server:
        object.__setattr__(server.state, "batches", None)
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/files/a"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches"),
            ("POST", "/v1/batches/a/cancel"),
        ):
            answer = await server.http.request(method, path)
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["code"] == "not_enabled"
            assert "--data-dir" in error["message"]


def test_the_number_of_files_is_bounded(tmp_path: Path):
    store = FileStore(BatchDatabase(tmp_path), max_bytes=1000, max_files=3)
    for _ in range(3):
        store.begin(b"", 1)
    with pytest.raises(RateLimited, match="at most 3"):
        store.begin(b"", 1)
    store.database.close()


def test_what_died_in_the_middle_is_swept_away(tmp_path: Path):
    clock = FakeClock()
    store = FileStore(BatchDatabase(tmp_path), max_bytes=1000, clock=clock)
    died = store.begin(b"", 10)
    store.path(died).write_bytes(b"ha")
    half_deleted = store.begin(b"", 10)
    store.path(half_deleted).write_bytes(b"x")
    with store.database.transaction() as connection:
        store.finish(
            connection,
            half_deleted,
            filename="a",
            purpose="batch",
            num_bytes=1,
            keep_seconds=None,
        )
        connection.execute("UPDATE files SET state = 'deleting' WHERE id = ?", (half_deleted,))
    with pytest.raises(NotFound):
        store.find(b"", half_deleted)
    store.sweep()
    assert [path.name for path in (tmp_path / "files").iterdir()] == [died], "it may still go on"
    clock.now += 3601
    store.sweep()
    assert list((tmp_path / "files").iterdir()) == []
    store.begin(b"", 1000)
    store.database.close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file"):
        BatchDatabase(tmp_path / "file" / "data")
    (tmp_path / "wavefill.sqlite3").write_text("no database at all, but a text of some length")
    with pytest.raises(DataError, match="not a database"):
        BatchDatabase(tmp_path)


def test_a_directory_of_a_later_version_is_left_alone(tmp_path: Path):
    database = BatchDatabase(tmp_path)
    with database.transaction() as connection:
        connection.execute("PRAGMA user_version = 7")
    database.close()
    with pytest.raises(DataError, match="another version"):
        BatchDatabase(tmp_path)


def test_a_commit_that_fails_is_rolled_back_and_the_next_transaction_works(tmp_path: Path):
    database = BatchDatabase(tmp_path)
    with database.reading() as connection:
        fail_commits_of(connection)
    for _ in range(2):
        with (
            pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"),
            database.transaction() as connection,
        ):
            connection.execute("INSERT INTO children VALUES (7)")
    with database.transaction() as connection:
        connection.execute("INSERT INTO parents VALUES (1)")
    with database.reading() as connection:
        assert not connection.in_transaction
        assert connection.execute("SELECT count(*) FROM children").fetchone()[0] == 0
    database.close()


def test_an_error_after_which_sqlite_has_rolled_back_itself_is_the_one_that_is_raised(
    tmp_path: Path,
):
    database = BatchDatabase(tmp_path)
    with (
        pytest.raises(sqlite3.IntegrityError, match="UNIQUE"),
        database.transaction() as connection,
    ):
        for _ in range(2):
            connection.execute("INSERT OR ROLLBACK INTO failures VALUES ('batch', 1, 1)")
    database.close()


def test_only_the_user_of_the_server_can_look_into_the_directory(tmp_path: Path):
    BatchDatabase(tmp_path / "data").close()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0
    assert (tmp_path / "data" / "files").stat().st_mode & 0o077 == 0


class MultipartParts:
    """Takes the parts of a form."""

    def __init__(self) -> None:
        self.parts: list[list[object]] = []
        self.open = False

    def begin(self, name: str, filename: str | None) -> None:
        assert not self.open
        self.open = True
        self.parts.append([name, filename, b""])

    def data(self, chunk: bytes) -> None:
        assert self.open
        self.parts[-1][2] += chunk  # type: ignore[operator]

    def end(self) -> None:
        assert self.open
        self.open = False


def read_in_chunks(body: bytes, cuts: list[int]) -> list[list[object]]:
    parts = MultipartParts()
    reader = MultipartReader(b"bound", parts)
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(places):
        reader.feed(body[start:end])
    reader.close()
    return parts.parts


near_boundaries = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"--", b"\r\n--boun", b"\r\n--", b"bound", b"x", b"\0"])
).map(b"".join)


@given(st.lists(near_boundaries, max_size=3), st.lists(st.integers(0, 10**6), max_size=8))
def test_a_form_reads_the_same_however_it_is_cut(contents: list[bytes], cuts: list[int]):
    contents = [content for content in contents if b"\r\n--bound" not in b"\r\n" + content]
    contents = [content for content in contents if not content.endswith(b"\r\n--bound"[:-1])]
    body = b"".join(
        b'--bound\r\nContent-Disposition: form-data; name="p%d"\r\n\r\n%b\r\n' % (index, content)
        for index, content in enumerate(contents)
    )
    body += b"--bound--\r\n"
    expected = [[f"p{index}", None, content] for index, content in enumerate(contents)]
    assert read_in_chunks(body, cuts) == expected


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=4), st.booleans())
def test_no_body_breaks_the_reader_of_forms(noise: bytes, cuts: list[int], begun: bool):
    head = b'--bound\r\ncontent-disposition: form-data; name="a"' if begun else b""
    try:
        read_in_chunks(head + noise, cuts)
    except RequestError as error:
        assert error.code == "invalid_multipart"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('form-data; name="a"', ("a", None)),
        ("form-data; name=a", ("a", None)),
        ('form-data; name="file"; filename="b c.jsonl"', ("file", "b c.jsonl")),
        ("form-data; name=\"file\"; filename*=utf-8''%C3%A4.jsonl", ("file", "\u00e4.jsonl")),
        ("form-data; name=\"file\"; filename*=undefined''a.jsonl", ("file", "a.jsonl")),
        ("form-data; name=\"file\"; filename*=\0''a.jsonl", ("file", "a.jsonl")),
        ("form-data; name=\"file\"; filename*=utf-7''+2AA-", ("file", "+2AA-")),
        ('FORM-DATA; NAME="file"; filename=""', ("file", "")),
    ],
)
def test_names_of_parts_are_read_as_clients_write_them(
    header: str, expected: tuple[str, str | None]
):
    body = b"--bound\r\nContent-Type: x\r\nContent-Disposition: %b\r\n\r\nv\r\n--bound--"
    assert read_in_chunks(body % header.encode(), [])[0][:2] == list(expected)


def test_parameters_that_cannot_be_read_are_refused():
    many = "9" * 5000  # more digits than Python turns into a number
    head = f"Content-Disposition: form-data; name=file; filename*{many}=a\r\n\r\n"
    with pytest.raises(RequestError, match="content-disposition cannot be read"):
        read_in_chunks(b"--bound\r\n" + head.encode(), [])
    with pytest.raises(RequestError, match="content-type cannot be read"):
        boundary_of(f"multipart/form-data; boundary*{many}=b")


async def test_reading_a_large_form_takes_no_longer_for_what_it_holds(server: BatchServer):
    # A reader that looks at each byte of what may begin a boundary would need minutes.
    answer = await server.http.post(
        "/v1/files",
        data={"purpose": "user_data"},
        files={"file": ("a", b"\r\n--" * 8_000_000)},
        timeout=httpx.Timeout(60),
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["bytes"] == 32_000_000
