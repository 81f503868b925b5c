"""The text and the fields of a RequestError."""

from __future__ import annotations

import pytest

from server.errors import FieldPath, RequestError

CONTENT = FieldPath("messages", 0) / "content" / 2


def test_fields_stand_in_backticks_and_the_first_is_the_param():
    error = RequestError("{} is {}: see {stream_options.include_usage}", (CONTENT, 7))
    assert error.message == "`messages[0].content[2]` is 7: see `stream_options.include_usage`"
    assert str(error) == error.message and error.param == "messages[0].content[2]"


def test_values_are_written_as_their_format_says():
    assert RequestError("{:g} s, {!r} and {{}}", (2.50, "a")).message == "2.5 s, 'a' and {}"


@pytest.mark.parametrize("text", ["{}", "{stop}", "`stop`", "{0", "}"])
def test_what_a_caller_wrote_is_no_field(text: str):
    error = RequestError("the model {} is not here", text, param=FieldPath("model"))
    error.rename_fields(lambda path: FieldPath("name") if path == ("model",) else FieldPath("x"))
    assert error.message == f"the model {text} is not here" and error.param == "name"


def test_an_error_without_a_field_has_no_param():
    assert RequestError("the body is empty").param is None


def test_fields_are_renamed_in_the_text_and_in_the_param():
    error = RequestError("{stop} and {stop[0]} beside {n}", param=FieldPath("n"))
    error.rename_fields(lambda path: FieldPath("new", *path))
    assert error.message == "`new.stop` and `new.stop[0]` beside `new.n`" and error.param == "new.n"


def test_a_long_path_is_shortened_in_the_text_alone():
    path = FieldPath("tools", *["properties"] * 40)
    error = RequestError("{} is wrong", path)
    assert error.param == str(path)
    assert error.message == f"`{str(path)[:60]}...{str(path)[-100:]}` is wrong"
