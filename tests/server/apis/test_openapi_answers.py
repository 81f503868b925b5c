"""What the OpenAPI document says of answers is what they are."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from server.apis.error_format import in_error_format
from server.app import ROUTES, create_app
from server.errors import error_body
from tests.support.server.batch_server import BatchServer, line

MESSAGES = [{"role": "user", "content": "Hi"}]
ALL = {"return_token_ids": True, "prompt_logprobs": 1, "timings": True}
SCORES = {"logprobs": True, "top_logprobs": 2}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2} | ALL | SCORES),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True} | ALL),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "return_documents": False}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1, "metadata": {"a": "b"}}),
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/api/chat", {"messages": MESSAGES, "stream": False}),
    ("/api/generate", {"prompt": "Hi", "stream": False}),
    ("/api/show", {}),
    ("/api/embed", {"input": ["a", "b"]}),
    ("/api/embeddings", {"prompt": "a"}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2]}),
]
PLAIN = [
    "/v1/models", "/v1/models/fake", "/api/tags", "/api/ps", "/api/version", "/version",
    "/server_info", "/v1/loads", "/health", "/readyz", "/ready", "/ping", "/livez", "/v1/files",
    "/v1/batches",
]  # fmt: skip


_paths: dict[str, Any] = {}  # of the document, which takes longer to make than a test


def schema_of(server: BatchServer, method: str, path: str) -> dict[str, Any]:
    if not _paths:
        _paths.update(create_app(server.state).openapi()["paths"])
    answers = _paths[path][method]["responses"]["200"]["content"]
    return answers["application/json"]["schema"]


async def asked(
    server: BatchServer, method: str, path: str, pattern: str = "", **options: Any
) -> Any:
    """The answer, which fits the schema of its route."""
    answer = await server.http.request(method.upper(), path, **options)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), schema_of(server, method, pattern or path))
    return answer.json()


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_answers_to_a_post_fit_their_schema(
    server: BatchServer, path: str, body: dict[str, Any]
):
    await asked(server, "post", path, json={"model": "fake"} | body)


@pytest.mark.parametrize("path", PLAIN)
async def test_answers_to_a_get_fit_their_schema(server: BatchServer, path: str):
    await asked(server, "get", path, path.replace("models/fake", "models/{name}"))


async def test_what_is_said_of_a_request_fits(server: BatchServer):
    headers = {"x-request-id": "mine"}
    for path, body in BODIES[0], BODIES[4]:
        await asked(server, "post", path, json={"model": "fake"} | body, headers=headers)
        await asked(server, "get", "/v1/requests/mine", "/v1/requests/{name}")


async def test_what_is_said_of_a_stored_response_fits(server: BatchServer):
    body = {"model": "fake", "input": "Hi"}
    made = await asked(server, "post", "/v1/responses", json=body)
    path, pattern = f"/v1/responses/{made['id']}", "/v1/responses/{id}"
    await asked(server, "get", path, pattern)
    items = await asked(server, "get", f"{path}/input_items", f"{pattern}/input_items")
    assert len(items["data"]) == 1
    await asked(server, "delete", path, pattern)
    server.engine.held = True
    made = await asked(server, "post", "/v1/responses", json=body | {"background": True})
    path = f"/v1/responses/{made['id']}/cancel"
    assert (await asked(server, "post", path, f"{pattern}/cancel"))["status"] == "cancelled"


async def test_what_is_said_of_a_stored_chat_completion_fits(server: BatchServer):
    body = {"model": "fake", "messages": MESSAGES, "store": True, "metadata": {"a": "b"}}
    made = await asked(server, "post", "/v1/chat/completions", json=body)
    path, pattern = f"/v1/chat/completions/{made['id']}", "/v1/chat/completions/{id}"
    assert await asked(server, "get", path, pattern) == made | {
        **dict.fromkeys(["tools", "tool_choice", "response_format", "seed", "input_user"]),
        **dict.fromkeys(["temperature", "top_p", "presence_penalty", "frequency_penalty"]),
    }
    listed = await asked(server, "get", "/v1/chat/completions")
    messages = await asked(server, "get", f"{path}/messages", f"{pattern}/messages")
    assert len(listed["data"]) == len(messages["data"]) == 1
    await asked(server, "post", path, pattern, json={"metadata": {}})
    await asked(server, "delete", path, pattern)


async def test_what_is_said_of_files_and_batches_fits(server: BatchServer):
    files = {"file": ("in.jsonl", line("a"))}
    made = await asked(server, "post", "/v1/files", data={"purpose": "batch"}, files=files)
    path, pattern = f"/v1/files/{made['id']}", "/v1/files/{file_id}"
    await asked(server, "get", path, pattern)
    body = {"input_file_id": made["id"], "completion_window": "24h"}
    batch = await asked(
        server, "post", "/v1/batches", json=body | {"endpoint": "/v1/chat/completions"}
    )
    for method, end in (("get", ""), ("post", "/cancel")):
        each = f"/v1/batches/{batch['id']}{end}"
        await asked(server, method, each, "/v1/batches/{batch_id}" + end)
    server.run_batches()
    await server.until(batch["id"])
    assert len((await asked(server, "get", "/v1/batches"))["data"]) == 1
    assert len((await asked(server, "get", "/v1/files"))["data"]) == 1
    await asked(server, "delete", path, pattern)


STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2} | SCORES),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "timings": True}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "background": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("/api/chat", {"messages": MESSAGES}),
    ("/api/generate", {"prompt": "Hi"}),
]


def fits(item: Any, schema: dict[str, Any]) -> bool:
    """Also the JSON in its texts: the validator only notes that there should be some."""
    if "anyOf" in schema:
        return any(fits(item, each) for each in schema["anyOf"])
    if "contentSchema" in schema:
        return isinstance(item, str) and fits(json.loads(item), schema["contentSchema"])
    if not jsonschema.Draft202012Validator(schema).is_valid(item):
        return False
    return all(
        fits(item[name], part)
        for name, part in schema.get("properties", {}).items()
        if name in item
    )


def items_of(content_type: str, text: str) -> list[Any]:
    if content_type == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    frames = [frame.splitlines() for frame in text.split("\n\n") if frame]
    return [dict(line.split(": ", 1) for line in lines) for lines in frames]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("path", "body"), STREAMED)
async def test_each_item_of_a_stream_fits_its_schema(
    server: BatchServer, path: str, body: dict[str, Any], fails: bool
):
    server.engine.fail_after = 1 if fails else None
    answer = await server.http.post(path, json={"model": "fake", "stream": True} | body)
    assert answer.status_code == 200, answer.text
    kind = answer.headers["content-type"].split(";")[0]
    operation = create_app(server.state).openapi()["paths"][path]["post"]
    schema = operation["responses"]["200"]["content"][kind]["itemSchema"]
    items = items_of(kind, answer.text)
    assert len(items) > 1 and fails == ("a seeded fault" in answer.text)
    for item in items:
        assert fits(item, schema), item


async def test_every_route_is_described_down_to_its_fields(server: BatchServer):
    document = create_app(server.state).openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation["responses"]["200"]["content"]
            if "application/json" in content:
                assert content["application/json"]["schema"]["properties"], (method, path)
    assert len(json.dumps(document)) < 400_000


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/files", {"after", "limit", "order", "purpose"}),
        ("/v1/batches", {"after", "limit"}),
        ("/v1/responses/{id}/input_items", {"after", "include", "limit", "order", "id"}),
        ("/v1/chat/completions", {"after", "limit", "metadata", "model", "order"}),
        ("/v1/chat/completions/{id}/messages", {"after", "limit", "order", "id"}),
    ],
)
async def test_parameters_of_lists_are_described(server: BatchServer, path: str, names: set[str]):
    operation = create_app(server.state).openapi()["paths"][path]["get"]
    assert {parameter["name"] for parameter in operation["parameters"]} == names


async def test_docs_offer_requests_that_are_answered(server: BatchServer):
    document = create_app(server.state).openapi()
    tried = 0
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            continue
        body = content["application/json"]["example"]
        if path == "/v1/batches":
            body = body | {"input_file_id": await server.upload(line("a"))}
        if path == "/v1/chat/completions/{id}":
            stored = {"model": "fake", "messages": MESSAGES, "store": True}
            made = await server.http.post("/v1/chat/completions", json=stored)
            path = path.replace("{id}", made.json()["id"])
        answer = await server.http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        tried += 1
    assert tried > 15


async def test_the_document_names_each_endpoint_under_the_heading_of_its_file(server: BatchServer):
    paths = create_app(server.state).openapi()["paths"]
    found = {(tag, path) for path, each in paths.items() for tag in tags_of(each)}
    groups = [part.endpoints for part in ROUTES]
    declared = {(group.tag, endpoint.path) for group in groups for endpoint in group.documented}
    assert found == declared and len(found) > 40


def tags_of(methods: dict[str, Any]) -> list[str]:
    return [tag for operation in methods.values() for tag in operation["tags"]]


async def test_the_error_format_that_is_declared_is_the_one_of_the_path(server: BatchServer):
    document = create_app(server.state).openapi()
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        body = in_error_format(
            path, 400, error_body("no", "invalid_request_error", None, None), None
        )
        for operation in methods.values():
            schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            jsonschema.validate(json.loads(body), schemas[schema["$ref"].rsplit("/", 1)[-1]])
