"""Chat completions that are kept: fetched, listed, described, forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.chat_store import ChatsQuery, ChatStore
from server.apis.responses.database import Limits, ResponsesDatabase
from server.apis.responses.store import ResponseStore
from server.errors import Unavailable
from tests.support.server.fake_engine import GREETING, FakeServer

HELLO: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}
KEPT: dict[str, Any] = HELLO | {"store": True}


ANY = ChatsQuery.model_validate({})


def test_a_completion_is_fetched_as_it_was_answered_until_it_is_deleted(fake: FakeServer):
    chats = fake.client().chat.completions
    made = chats.create(**KEPT, metadata={"a": "b"}, temperature=0.5, user="me")
    found = chats.retrieve(made.id)
    shown = found.model_dump()
    assert {name: shown[name] for name in made.model_dump()} == made.model_dump()

    assert (shown["metadata"], shown["temperature"], shown["input_user"]) == (
        {"a": "b"},
        0.5,
        "me",
    )
    deleted = chats.delete(made.id)
    assert deleted.deleted and deleted.id == made.id
    for call in (chats.retrieve, chats.delete, chats.messages.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        chats.update(made.id, metadata={})


def test_a_streamed_completion_is_kept_whole(fake: FakeServer):
    chats = fake.client().chat.completions
    chunks = list(chats.create(**KEPT, stream=True, n=2))
    found = chats.retrieve(chunks[0].id)
    assert [choice.message.content for choice in found.choices] == [GREETING, GREETING]
    assert [choice.finish_reason for choice in found.choices] == ["stop", "stop"]
    assert found.object == "chat.completion" and found.created == chunks[0].created
    assert found.usage is not None and found.usage.completion_tokens > 0


@pytest.mark.parametrize("store", [None, False])
def test_nothing_is_kept_unless_it_is_asked_for(fake: FakeServer, store: bool | None):
    chats = fake.client().chat.completions
    made = chats.create(**HELLO, store=store)
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(made.id)


def test_lists_come_in_pages_by_time_metadata_and_model(fake: FakeServer):
    chats = fake.client().chat.completions
    series = {"series": "one"}
    made = [
        chats.create(**KEPT, metadata=series | {"odd": str(n % 2), "[n]": str(n)}).id
        for n in range(5)
    ]
    assert [each.id for each in chats.list(metadata=series, limit=2)] == made  # pages follow
    first = chats.list(metadata=series, limit=2)
    assert (first.has_next_page(), [each.id for each in first.data]) == (True, made[:2])
    assert [each.id for each in chats.list(metadata=series, order="desc")] == made[::-1]
    odd = chats.list(metadata=series | {"odd": "1"}, limit=100)
    assert [each.id for each in odd] == [made[1], made[3]] and not odd.has_next_page()
    assert [each.id for each in chats.list(metadata={"[n]": "3"})] == [made[3]]
    assert [each.id for each in chats.list(metadata=series, model="fake")] == made
    assert not chats.list(metadata=series, model="other").data
    assert not chats.list(metadata={"series": "two"}).data
    last = chats.list(metadata=series, after=made[3])
    assert [each.id for each in last.data] == [made[4]]


def test_metadata_can_be_replaced_and_taken_away(fake: FakeServer):
    chats = fake.client().chat.completions
    made = chats.create(**KEPT, metadata={"old": "x"})
    changed = chats.update(made.id, metadata={"new": "y"})
    assert changed.id == made.id and changed.model_dump()["metadata"] == {"new": "y"}
    assert not chats.list(metadata={"old": "x"}).data
    assert [each.id for each in chats.list(metadata={"new": "y"})] == [made.id]
    assert chats.update(made.id, metadata=None).model_dump()["metadata"] == {}
    assert chats.retrieve(made.id).model_dump()["metadata"] == {}


def test_messages_come_as_they_were_sent_in_pages_of_either_order(fake: FakeServer):
    chats = fake.client().chat.completions
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "c"},
    ]
    id = chats.create(model="fake", messages=messages, store=True).id
    listed = list(chats.messages.list(id, limit=3))
    stored = [(str(each.role), each.content) for each in listed]
    assert stored == [
        ("system", "Be brief."),
        ("user", None),
        ("assistant", "ab"),
        ("user", "c"),
    ]
    assert [part.model_dump(exclude_none=True) for part in listed[1].content_parts or []] == parts
    assert [each.id for each in listed] == [f"{id}-{n}" for n in range(4)]
    backwards = chats.messages.list(id, order="desc", after=f"{id}-2")
    assert [each.id for each in backwards] == [f"{id}-1", f"{id}-0"]


def test_responses_and_completions_are_not_found_as_one_another(fake: FakeServer):
    client = fake.client()
    chat = client.chat.completions.create(**KEPT).id
    response = client.responses.create(model="fake", input="Hello").id
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(chat)
    for call in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            call(response)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="fake", input="More", previous_response_id=chat)


@pytest.mark.parametrize(
    ("method", "path", "options", "param"),
    [
        ("GET", "", {"params": {"limit": 0}}, "limit"),
        ("GET", "", {"params": {"limit": "many"}}, "limit"),
        ("GET", "", {"params": {"order": "up"}}, "order"),
        ("GET", "", {"params": {"after": "chatcmpl-none"}}, "after"),
        ("GET", "", {"params": {"before": "x"}}, "before"),
        ("GET", "", {"params": {"metadata": "x"}}, "metadata"),
        ("GET", "", {"params": {f"metadata[{n}]": "x" for n in range(17)}}, "metadata"),
        ("GET", "", {"params": {"metadata[a][b]": "x"}}, "metadata"),
        ("GET", "", {"params": {"metadata[a][]": "x"}}, "metadata"),
        ("GET", "", {"params": {"metadata[]": "x"}}, "metadata"),
        ("GET", "/ID/messages", {"params": {"after": "x"}}, "after"),
        ("GET", "/ID/messages", {"params": {"limit": 101}}, "limit"),
        ("GET", "/ID", {"params": {"stream": "true"}}, "stream"),
        ("DELETE", "/ID", {"params": {"x": "1"}}, "x"),
        ("POST", "/ID", {"json": {}}, "metadata"),
        ("POST", "/ID", {"json": {"metadata": {"a": 1}}}, "metadata.a"),
        ("POST", "/ID", {"json": {"metadata": {}, "model": "x"}}, "model"),
        ("POST", "", {"json": KEPT | {"store": 1}}, "store"),
        ("POST", "", {"json": KEPT | {"metadata": {"a": ["b"]}}}, "metadata.a"),
    ],
)
def test_what_is_wrong_is_named(
    fake: FakeServer, method: str, path: str, options: dict[str, Any], param: str
):
    id = fake.client().chat.completions.create(**KEPT).id
    url = f"{fake.url}/v1/chat/completions{path.replace('ID', id)}"
    answer = httpx.request(method, url, **options)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def completion(id: str, text: str = "") -> dict[str, Any]:
    return {"id": id, "model": "fake", "metadata": {}, "choices": [text]}


async def test_the_oldest_go_when_there_is_no_room_and_lists_forget_them_too():
    chats = ChatStore(ResponseStore(limits=Limits(responses=3)), b"me")
    body = ChatRequest.model_validate(KEPT)
    for n in range(5):
        await chats.keep(completion(f"chatcmpl-{n}"), body)
    page = await chats.page(ANY)
    assert all(f"chatcmpl-{n}".encode() in page for n in (2, 3, 4))
    assert not any(f"chatcmpl-{n}".encode() in page for n in (0, 1))


async def test_a_page_leaves_out_what_another_process_removes_meanwhile():
    store = ResponseStore()
    chats = ChatStore(store, b"me")
    await chats.keep(completion("chatcmpl-1"), ChatRequest.model_validate(KEPT))
    removed = ("chatcmpl-0", b"chat:me", 0.0, "fake", "{}")  # listed, but without its response

    def insert(database: ResponsesDatabase) -> None:
        database.connection.execute("INSERT INTO chats VALUES (?, ?, ?, ?, ?)", removed)

    await store.call(insert)
    page = await chats.page(ANY)
    assert b"chatcmpl-1" in page and b"chatcmpl-0" not in page


async def test_what_is_too_large_is_not_kept_and_the_log_says_so(caplog: pytest.LogCaptureFixture):
    chats = ChatStore(ResponseStore(limits=Limits(bytes=4000)), b"me")
    large = completion("chatcmpl-1", "x" * 2000)
    await chats.keep(large, ChatRequest.model_validate(KEPT))
    assert large["store"] is False
    assert "chatcmpl-1 is not stored: it is too large" in caplog.text
    assert b'"data":[]' in await chats.page(ANY)


async def test_a_key_sees_its_own_completions_only():
    store = ResponseStore()
    mine, others = ChatStore(store, b"aa"), ChatStore(store, b"bb")
    await mine.keep(completion("chatcmpl-1"), ChatRequest.model_validate(KEPT))
    assert b"chatcmpl-1" in await mine.page(ANY)
    assert b'"data":[]' in await others.page(ANY)


async def test_a_failing_store_is_an_error_before_the_answer_and_logged_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    chats = ChatStore(ResponseStore(str(tmp_path / "no" / "folder")), b"me")
    with pytest.raises(Unavailable) as refused:
        await chats.check()
    assert (refused.value.status, refused.value.code) == (503, "store_failed")
    await chats.keep(completion("chatcmpl-1"), ChatRequest.model_validate(KEPT))
    assert "chatcmpl-1 is not stored" in caplog.text
