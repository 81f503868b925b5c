"""Responses that are kept: continued, fetched, cancelled, followed, forgotten."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from server.apis.responses.database import Limits, ResponsesDatabase
from server.apis.responses.store import ResponseStore, StoreUnusable, find_items, history, keep
from server.errors import RequestError, Unavailable
from tests.support.server.failing_commit import fail_commits_of
from tests.support.server.fake_engine import GREETING, FakeServer, fake_server

HELLO: dict[str, Any] = {"model": "fake", "input": "Hello"}
ME, OTHER = b"me", b"other"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def prompt_of(fake: FakeServer) -> str:
    return fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(b.split("\ndata: ")[1]) for b in answer.text.split("\n\n") if b]


def test_a_conversation_is_continued_from_its_last_response(fake: FakeServer):
    client = fake.client()
    first = client.responses.create(**HELLO, instructions="Be brief.")
    second = client.responses.create(model="fake", input="More", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    client.responses.create(
        model="fake", input="Stop", previous_response_id=second.id, instructions="Be long."
    )
    assert prompt_of(fake) == (
        f"<|system|>Be long.<|end|><|user|>Hello<|end|><|assistant|>{GREETING}<|end|>"
        f"<|user|>More<|end|><|assistant|>{GREETING}<|end|><|user|>Stop<|end|><|assistant|>"
    )


def test_a_streamed_response_can_be_continued_as_soon_as_its_end_was_told(fake: FakeServer):
    client = fake.client()
    stream = client.responses.create(**HELLO, stream=True)
    id = next(e.response.id for e in stream if e.type == "response.completed")
    assert client.responses.create(**HELLO, previous_response_id=id).status == "completed"


def test_an_item_reference_stands_for_the_item(fake: FakeServer):
    client = fake.client()
    first = client.responses.create(**HELLO)
    client.responses.create(
        model="fake",
        input=[
            {"role": "user", "content": "Hello"},
            {"type": "item_reference", "id": first.output[0].id or ""},
            {"role": "user", "content": "More"},
        ],
    )
    assert f"<|assistant|>{GREETING}<|end|><|user|>More" in prompt_of(fake)


def test_a_response_that_was_not_stored_is_not_there(fake: FakeServer):
    client = fake.client()
    answer = client.responses.create(**HELLO, store=False)
    for id in (answer.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**HELLO, previous_response_id=id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


def test_a_response_is_fetched_as_it_was_given_until_it_is_deleted(fake: FakeServer):
    client = fake.client()
    answer = client.responses.create(**HELLO, metadata={"a": "b"})
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)


def test_input_items_come_in_pages_of_either_order(fake: FakeServer):
    client = fake.client()
    answer = client.responses.create(
        model="fake", input=[{"role": "user", "content": f"item {n}"} for n in range(5)]
    )

    def texts(items: Any) -> list[str]:
        return [item.content[0].text for item in items]

    listed = client.responses.input_items.list
    assert texts(listed(answer.id, order="asc")) == [f"item {n}" for n in range(5)]
    page = listed(answer.id, limit=2)
    assert texts(page.data) == ["item 4", "item 3"] and page.has_more
    assert texts(page) == [f"item {n}" for n in (4, 3, 2, 1, 0)]
    rest = listed(answer.id, order="asc", after=page.data[0].id)
    assert rest.data == [] and not rest.has_more


def test_a_background_response_is_made_without_a_connection(fake: FakeServer):
    fake.engine.held = True
    client = fake.client()
    answer = client.responses.create(**HELLO, background=True)
    assert (answer.status, answer.background, answer.output) == ("queued", True, [])
    assert client.responses.retrieve(answer.id).status == "queued"
    with pytest.raises(openai.BadRequestError, match="queued"):
        client.responses.create(**HELLO, previous_response_id=answer.id)
    fake.engine.held = False
    wait_until(lambda: client.responses.retrieve(answer.id).status == "completed")
    assert client.responses.retrieve(answer.id).output_text == GREETING
    assert client.responses.cancel(answer.id).status == "completed"


def test_a_background_response_in_the_making_can_be_cancelled(fake: FakeServer):
    fake.engine.delay = 0.05
    client = fake.client()
    answer = client.responses.create(**HELLO, background=True)
    wait_until(lambda: client.responses.retrieve(answer.id).status == "in_progress")
    cancelled = client.responses.cancel(answer.id)
    assert cancelled.status == "cancelled"
    assert fake.engine.aborted and not fake.engine.pending


def test_a_background_response_that_is_deleted_is_made_no_further(fake: FakeServer):
    fake.engine.held = True
    client = fake.client()
    answer = client.responses.create(**HELLO, background=True)
    client.responses.delete(answer.id)
    wait_until(lambda: bool(fake.engine.aborted))
    assert not fake.engine.pending


def test_a_background_response_tells_how_it_failed(fake: FakeServer):
    fake.engine.fail_after = 1
    client = fake.client()
    answer = client.responses.create(**HELLO, background=True)
    wait_until(lambda: client.responses.retrieve(answer.id).status == "failed")
    error = client.responses.retrieve(answer.id).error
    assert error and error.code == "server_error" and "a seeded fault" in error.message


def test_only_a_background_response_can_be_cancelled(fake: FakeServer):
    client = fake.client()
    answer = client.responses.create(**HELLO)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(answer.id)


def test_events_of_a_background_response_are_followed_from_any_number(fake: FakeServer):
    fake.engine.delay = 0.01
    stream = fake.client().responses.create(**HELLO, background=True, stream=True)
    seen = []
    for event in stream:
        seen.append(event)
        if len(seen) == 5:
            break
    stream.close()
    created = seen[0]
    assert created.type == "response.created" and created.response.status == "queued"
    url = f"{fake.url}/v1/responses/{created.response.id}"
    rest = events_of(httpx.get(url, params={"stream": "true", "starting_after": 4}))
    assert rest[0]["sequence_number"] == 5 and rest[-1]["type"] == "response.completed"
    all_of_them = events_of(httpx.get(url, params={"stream": "true"}))
    assert all_of_them[5:] == rest
    kinds = [event["type"] for event in all_of_them]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["sequence_number"] for event in all_of_them] == list(range(len(kinds)))
    text = "".join(e["delta"] for e in all_of_them if e["type"] == "response.output_text.delta")
    assert text == GREETING and not fake.engine.aborted


def test_events_that_were_not_kept_are_refused(fake: FakeServer):
    answer = fake.client().responses.create(**HELLO)
    told = httpx.get(f"{fake.url}/v1/responses/{answer.id}", params={"stream": "true"})
    assert told.status_code == 400 and told.json()["error"]["param"] == "stream"


def test_a_cancelled_response_ends_its_stream_with_its_last_state(fake: FakeServer):
    fake.engine.delay = 0.05
    client = fake.client()
    events = []
    for event in client.responses.create(**HELLO, background=True, stream=True):
        events.append(event)
        if event.type == "response.output_text.delta" and not fake.engine.aborted:
            client.responses.cancel(events[0].response.id)
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.status == "cancelled"
    assert GREETING.startswith(last.response.output_text) and fake.engine.aborted


def test_a_follower_of_a_deleted_response_hears_the_end(fake: FakeServer):
    fake.engine.held = True
    client = fake.client()
    stream = client.responses.create(**HELLO, background=True, stream=True)
    created = next(iter(stream))
    assert created.type == "response.created"
    client.responses.delete(created.response.id)
    assert [event.type for event in stream] in ([], ["response.queued"])


def test_another_keys_responses_are_not_there(tmp_path: Path) -> None:
    keys = ("ann", "bob")
    with fake_server(tmp_path, api_keys=keys) as fake:
        ann, bob = (fake.client().with_options(api_key=key) for key in keys)
        made = ann.responses.create(**HELLO)
        running = ann.responses.create(**HELLO, background=True, stream=True)
        other = next(iter(running))
        running.close()
        assert other.type == "response.created"
        for id in (made.id, other.response.id):
            for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    call(id)
            with pytest.raises(openai.NotFoundError):
                bob.responses.input_items.list(id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            bob.responses.create(**HELLO, previous_response_id=made.id)
        reference = {"type": "item_reference", "id": made.output[0].id}
        with pytest.raises(openai.BadRequestError, match="not found"):
            bob.responses.create(model="fake", input=[reference])  # type: ignore[list-item]
        assert ann.responses.retrieve(made.id) == made


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
    assert find_items(database, OTHER, {"msg_a"}) == {}
    assert set(find_items(database, ME, {"msg_a", "msg_b"})) == {"msg_a"}
    assert database.get(ME, "a") is not None and database.delete(ME, "a")
    assert total(database) == (0, 0) and find_items(database, ME, {"msg_a"}) == {}


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
    monkeypatch.setattr("server.apis.responses.store.MAX_CHAIN_BYTES", 1000)
    assert set(find_items(database, ME, {"msg_a"})) == {"msg_a"}
    with pytest.raises(RequestError, match="in more responses than this server looks through"):
        find_items(database, ME, {"msg_a", "msg_b"})
    database.add(ME, response("c", "x" * 500, "b"), [])
    with pytest.raises(RequestError, match="larger than this server puts together"):
        history(database, ME, "c")


def test_a_background_response_that_the_store_has_no_room_for_is_refused(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ResponsesDatabase, "add", lambda *_, **__: False)
    fake.engine.held = True
    with pytest.raises(openai.BadRequestError, match="`background` false"):
        fake.client().responses.create(**HELLO, background=True)
    wait_until(lambda: bool(fake.engine.aborted))
    fake.engine.held = False
    assert not fake.client().responses.create(**HELLO).model_extra["store"]  # type: ignore[index]


def test_responses_unused_for_long_are_deleted(database: ResponsesDatabase):
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


def test_a_process_hears_that_its_response_was_cancelled_or_deleted(database: ResponsesDatabase):
    running = response("run") | {"status": "in_progress", "output": []}
    database.add(ME, running, [], worker=0, streamed=True)
    assert database.update(running, [(0, b"one"), (1, b"two")]) and database.is_active("run")
    database.cancel("run")
    assert not database.update(running, [(2, b"three")]) and not database.is_active("run")
    assert database.events("run", 0, 10) == ([(1, b"two"), (2, b"three")], "in_progress")
    assert database.events("run", -1, 1) == ([(0, b"one")], "in_progress")
    database.delete(ME, "run")
    assert not database.update(running, []) and database.events("run", -1, 9) == ([], None)
    assert total(database) == (0, 0)


def test_two_processes_share_one_file_that_only_its_owner_may_read(tmp_path: Path):
    path = tmp_path / "store"
    one, two = ResponsesDatabase(str(path), Limits()), ResponsesDatabase(str(path), Limits())
    one.add(ME, response("a"), [])
    assert two.get(ME, "a") is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one.connection.close()
    two.connection.close()


def test_a_file_that_is_no_database_is_told_at_the_start(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("Buy milk. " * 100)
    for wrong in (path, tmp_path / "no" / "folder"):
        with pytest.raises(StoreUnusable, match="--response-store"):
            asyncio.run(ResponseStore(str(wrong)).open())


async def test_an_answer_whose_store_fails_is_given_and_says_so(caplog: pytest.LogCaptureFixture):
    store = ResponseStore()
    await store.call(lambda database: database.connection.execute("DROP TABLE total").close())
    answer = response("a") | {"store": True}
    await keep(store, ME, answer, [])
    assert answer["store"] is False
    assert "response a is not stored" in caplog.text
    with pytest.raises(Unavailable) as caught:
        await store.call(lambda database: database.add(ME, response("b"), []))
    assert (caught.value.status, caught.value.code) == (503, "store_failed")
