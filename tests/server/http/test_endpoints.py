"""A declaration that lacks what the OpenAPI document needs fails where it is written."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from server.http.endpoints import Endpoints
from server.http.openapi import DocumentedApp
from server.http.openapi_parts import TEXT, object_of
from server.http.validation import Body

ANSWER = object_of(text=TEXT)


class Plain(Body):
    model: str
    text: str


class Streamed(Plain):
    stream: bool = False


async def handler(request: Request) -> Response:
    return Response()


async def of_a_thing(request: Request, id: str) -> Response:
    return Response()


@pytest.mark.parametrize(
    ("path", "declared"),
    [
        ("/a", {"answer": ANSWER}),
        ("/a", {"summary": "A"}),
        ("/a", {"summary": "A", "answer": ANSWER, "body": Plain}),
        ("/a", {"summary": "A", "answer": ANSWER, "example": {}}),
        ("/a", {"summary": "A", "answer": ANSWER, "body": Streamed, "example": {}}),
        ("/a", {"summary": "A", "answer": ANSWER, "query": Streamed}),
        ("/a", {"summary": "A", "answer": ANSWER, "stream": TEXT}),
        ("/a/{id}", {"summary": "A", "answer": ANSWER}),
    ],
)
def test_an_incomplete_declaration_is_refused(path: str, declared: dict[str, Any]):
    with pytest.raises(AssertionError, match=path.replace("{", "\\{")):
        Endpoints("a tag").post(path, **declared)(handler)


def test_a_handler_takes_no_parameter_that_the_path_lacks():
    with pytest.raises(AssertionError, match="/a: the handler takes the path's parameters"):
        Endpoints("a tag").get("/a", summary="A", answer=ANSWER)(of_a_thing)


def test_one_path_and_method_is_declared_once():
    group = Endpoints("a tag")
    for _ in range(2):
        group.get("/a", summary="A", answer=ANSWER)(handler)
    with pytest.raises(AssertionError, match="two of get /a"):
        DocumentedApp([group], "m").openapi()


def test_a_declaration_becomes_an_operation():
    group = Endpoints("a tag", stream_type="text/x")
    group.post(
        "/a/{id:path}",
        aliases=["/b/{id}"],
        summary="A",
        body=Streamed,
        body_fields=["model", "stream"],
        example={"text": "b"},
        answer=ANSWER,
        stream=TEXT,
    )(of_a_thing)
    app = DocumentedApp([group], "served")
    [(path, methods)] = app.openapi()["paths"].items()
    operation = methods["post"]
    body = operation["requestBody"]["content"]["application/json"]
    assert (path, operation["tags"], operation["summary"]) == ("/a/{id}", ["a tag"], "A")
    assert [parameter["name"] for parameter in operation["parameters"]] == ["id"]
    assert body["example"] == {"model": "served", "text": "b"}
    assert list(body["schema"]["properties"]) == ["model", "stream"]
    answers = operation["responses"]["200"]["content"]
    assert answers["application/json"]["schema"] == ANSWER
    assert answers["text/x"]["itemSchema"] == TEXT
