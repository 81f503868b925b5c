"""The database of responses: keys, limits, several processes, failing commits."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.apis.responses import stored as kept
from server.apis.responses.database import ChainTooLong, Limits, ResponsesDatabase
from server.apis.responses.store import ResponseStore, StoreUnusable
from server.errors import Unavailable
from tests.support.server.failing_commit import fail_commits_of

ME, OTHER = b"me", b"other"


def response(id: str, text: str = "", previous: str | None = None) -> dict[str, Any]:
    item = {"id": f"msg_{id}", "type": "message", "content": text}
    return {
        "id": id,
        "previous_response_id": previous,
        "status": "completed",
        "output": [item],
        "background": False,
    }


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ResponsesDatabase]:
    database = ResponsesDatabase(
        str(tmp_path / "store"), Limits(bytes=4000, responses=8, seconds=1000)
    )
    yield database
    database.connection.close()


def ids(database: ResponsesDatabase) -> list[str]:
    rows = database.connection.execute("SELECT id FROM responses ORDER BY used").fetchall()
    return [id for (id,) in rows]


def total(database: ResponsesDatabase) -> tuple[int, int]:
    return database.connection.execute("SELECT * FROM total").fetchone()


def test_a_response_belongs_to_the_key_that_made_it(database: ResponsesDatabase):
    database.add(ME, response("a"), [])
    assert database.get(OTHER, "a") is None and not database.delete(OTHER, "a")
    assert database.items(OTHER, {"msg_a"}) == {}
    assert set(database.items(ME, {"msg_a", "msg_b"})) == {"msg_a"}
    assert database.get(ME, "a") is not None and database.delete(ME, "a")
    assert total(database) == (0, 0) and database.items(ME, {"msg_a"}) == {}


def test_the_least_used_responses_go_when_there_are_too_many(database: ResponsesDatabase):
    for number in range(8):
        database.add(ME, response(str(number)), [])
    database.get(ME, "0")
    database.add(ME, response("8"), [])
    assert ids(database) == ["2", "3", "4", "5", "6", "7", "0", "8"]


def test_the_least_used_responses_go_when_they_are_too_large(database: ResponsesDatabase):
    for number in range(7):
        assert database.add(ME, response(str(number), "x" * 700), [])
    count, size = total(database)
    assert size <= 4000 and count == len(ids(database)) == 4
    assert ids(database)[-1] == "6"
    assert not database.add(ME, response("large", "x" * 1001), [])


def test_references_are_looked_up_in_so_many_bytes_and_no_more(
    database: ResponsesDatabase, monkeypatch: pytest.MonkeyPatch
):
    for id in "ab":
        database.add(ME, response(id, "x" * 500), [])
    monkeypatch.setattr("server.apis.responses.database.MAX_CHAIN_BYTES", 1000)
    assert set(database.items(ME, {"msg_a"})) == {"msg_a"}
    with pytest.raises(ChainTooLong):
        database.items(ME, {"msg_a", "msg_b"})
    database.add(ME, response("c", "x" * 500, "b"), [])
    with pytest.raises(ChainTooLong):
        database.history(ME, "c")


def test_responses_that_were_not_used_for_long_are_deleted(database: ResponsesDatabase):
    database.add(ME, response("old"), [])
    database.connection.execute("UPDATE responses SET used = used - 2000")
    database.add(ME, response("new"), [])
    assert ids(database) == ["new"]


def test_what_is_being_made_stays_and_fails_when_its_process_starts_again(
    database: ResponsesDatabase,
):
    running = response("run") | {"status": "in_progress", "output": []}
    database.add(ME, running, [], worker=1, streamed=True)
    for number in range(20):
        database.add(ME, response(str(number)), [])
    assert database.status("run") == "in_progress"
    database.fail_orphans(0, 2)
    assert database.status("run") == "in_progress", "it is another process's"
    database.fail_orphans(1, 2)
    stored = database.get(ME, "run")
    assert stored and stored.status == "failed"
    assert "restarted" in json.loads(stored.response)["error"]["message"]


def test_a_commit_that_fails_is_rolled_back_and_the_next_response_is_kept(
    database: ResponsesDatabase,
):
    fail_commits_of(database.connection)
    database.connection.execute(
        "CREATE TRIGGER broken AFTER INSERT ON responses WHEN new.id = 'lost' "
        "BEGIN INSERT INTO children VALUES (7); END"
    )
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        database.add(ME, response("lost"), [])
    assert database.add(ME, response("kept"), [])
    assert ids(database) == ["kept"] and not database.connection.in_transaction


def test_an_update_reports_that_its_response_was_cancelled_or_deleted(database: ResponsesDatabase):
    running = response("run") | {"status": "in_progress", "output": []}
    database.add(ME, running, [], worker=0, streamed=True)
    assert database.update(running, [(0, b"one"), (1, b"two")]) and database.wanted("run")
    database.cancel("run")
    assert not database.update(running, [(2, b"three")]) and not database.wanted("run")
    assert database.events("run", 0, 10) == ([(1, b"two"), (2, b"three")], "in_progress")
    assert database.events("run", -1, 1) == ([(0, b"one")], "in_progress")
    database.delete(ME, "run")
    assert not database.update(running, []) and database.events("run", -1, 9) == ([], None)
    assert total(database) == (0, 0)


def test_two_processes_share_one_file_that_no_other_user_may_read(tmp_path: Path):
    path = tmp_path / "store"
    one, two = ResponsesDatabase(str(path), Limits()), ResponsesDatabase(str(path), Limits())
    one.add(ME, response("a"), [])
    assert two.get(ME, "a") is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one.connection.close()
    two.connection.close()


def test_a_file_that_is_no_database_is_an_error_at_the_start(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("Buy milk. " * 100)
    for wrong in (path, tmp_path / "no" / "folder"):
        with pytest.raises(StoreUnusable, match="--response-store"):
            asyncio.run(ResponseStore(str(wrong)).open())


async def test_an_answer_whose_store_fails_is_sent_with_store_false(
    caplog: pytest.LogCaptureFixture,
):
    store = ResponseStore()
    await store.call(lambda database: database.connection.execute("DROP TABLE total").close())
    answer = response("a") | {"store": True}
    await kept.keep(store, ME, answer, [])
    assert answer["store"] is False
    assert "response a is not stored" in caplog.text
    with pytest.raises(Unavailable) as caught:
        await store.call(lambda database: database.add(ME, response("b"), []))
    assert (caught.value.status, caught.value.code) == (503, "store_failed")
