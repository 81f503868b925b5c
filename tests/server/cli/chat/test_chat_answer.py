"""What `wavefill chat` prints of an answer's chunks, and what it sends back of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.cli.chat.answer import Answer
from server.cli.chat.image import ImageError, image_part, media_type
from server.cli.chat.prompt_line import PromptLine, paths_like
from server.cli.chat.session import Session
from server.cli.commands.chat import read_tools
from server.cli.main import UsageError


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(index: int, arguments: str, name: str | None = None, id: str | None = None) -> Any:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": id} if id else {})


CALLS = [
    chunk(tool_calls=[call(0, "", "sum", "a")]),
    chunk(tool_calls=[call(0, '{"x":')]),
    chunk(tool_calls=[call(0, "1}"), call(1, "{}", "now", "b")]),
    chunk("tool_calls"),
]


def test_reasoning_is_marked_and_is_not_sent_back(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer()
    for each in (
        chunk(reasoning="2 + 2"),
        chunk(reasoning=" = 4"),
        chunk(content="4"),
        chunk("stop"),
    ):
        answer.feed(each)
    assert capsys.readouterr().out == "[reasoning] 2 + 2 = 4\n\n4"
    assert answer.message() == {"role": "assistant", "content": "4"}
    assert answer.stats.finish == "stop"


def test_calls_are_printed_by_name_and_sent_back_whole(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer()
    for each in CALLS:
        answer.feed(each)
    assert capsys.readouterr().out == '[calls sum] {"x":1}\n[calls now] {}'
    assert answer.message()["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "sum", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]


class ScriptedServer:
    """Streams one list of chunks after the other."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []

    def stream(self, body: Any) -> Any:
        self.bodies.append(body | {"messages": list(body["messages"])})
        yield from self.answers.pop(0)


def test_results_of_tools_are_asked_for_and_the_model_goes_on() -> None:
    asked: list[str] = []
    results = iter(["1", "noon"])

    def read(prompt: str) -> str:
        asked.append(prompt)
        return next(results)

    server: Any = ScriptedServer(CALLS, [chunk(content="done"), chunk("stop")])
    session = Session(server, "m", read)
    session.take("add")
    assert asked == ["sum returns> ", "now returns> "]
    assert [each["role"] for each in server.bodies[1]["messages"]] == [
        *("user", "assistant", "tool", "tool"),
    ]
    assert server.bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "a", "content": "1"}
    assert session.turns[-1] == {"role": "assistant", "content": "done"}


def test_a_call_without_a_result_drops_the_turn() -> None:
    def read(prompt: str) -> str:
        raise EOFError

    server: Any = ScriptedServer(CALLS)
    session = Session(server, "m", read)
    session.take("add")
    assert session.turns == []


def test_ctrl_c_keeps_what_came_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(ScriptedServer):
        def stream(self, body: Any) -> Any:
            yield chunk(content="half an ")
            raise KeyboardInterrupt

    server: Any = Interrupted()
    session = Session(server, "m", lambda _: "")
    session.take("go")
    assert session.turns[-1] == {"role": "assistant", "content": "half an "}
    session.take("/stats")
    assert "ended by you" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
    ],
)
def test_the_kind_of_an_image_is_read_from_its_first_bytes(data: bytes, kind: str) -> None:
    assert media_type("photo.txt", data) == kind


def test_the_url_of_an_image_is_left_to_the_server_and_a_large_file_is_refused(
    tmp_path: Path,
) -> None:
    url = "https://example.com/a.png"
    assert image_part(url)["image_url"]["url"] == url
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ImageError, match="over 16 MiB"):
        image_part(str(tmp_path / "large.png"))


def test_paths_are_completed_with_their_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sun.txt").touch()
    (tmp_path / ".hidden").touch()
    assert paths_like(f"{tmp_path}/su") == [f"{tmp_path}/sub/", f"{tmp_path}/sun.txt"]
    assert paths_like(f"{tmp_path}/") == paths_like(f"{tmp_path}/su")
    assert paths_like(f"{tmp_path}/none/a") == []


def test_nothing_is_written_to_the_history_where_there_is_no_terminal(tmp_path: Path) -> None:
    with PromptLine((), tmp_path / "history"):
        pass
    assert not (tmp_path / "history").exists()


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("{}", "a JSON list"), ("[]", "a JSON list")]
)
def test_a_file_of_tools_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_tools(str(file))
