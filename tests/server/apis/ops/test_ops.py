"""Answers to probes, operators and browsers, whatever state the engine is in."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version

import httpx2 as httpx
import pytest

from runtime.messages import Progress
from runtime.stats import Stats
from tests.support.server.fake_engine import FakeServer

HEALTH = ["/health", "/readyz", "/ready", "/ping"]


def get(fake: FakeServer, path: str) -> httpx.Response:
    return httpx.get(fake.url + path, timeout=5)


@pytest.mark.parametrize("path", [*HEALTH, "/livez"])
def test_every_probe_is_200_while_the_engine_serves(fake: FakeServer, path: str):
    answer = get(fake, path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", [*HEALTH, "/livez"])
def test_head_answers_the_status_of_a_probe_without_a_body(fake: FakeServer, path: str):
    answer = httpx.head(fake.url + path, timeout=5)
    assert (answer.status_code, answer.content) == (200, b"")
    fake.engine.down = "the engine has been silent for 31 s"
    assert httpx.head(fake.url + path, timeout=5).status_code == 503


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 200) for path in [*HEALTH, "/livez", "/", "/version", "/server_info", "/metrics"]),
        *((path, 200) for path in ["/docs", "/openapi.json", "/static/swagger-ui.css"]),
        *((path, 200) for path in ["/v1/models", "/v1/models/alias", "/api/tags", "/api/ps"]),
        ("/api/version", 200),
        ("/v1/models/nobody", 404),
        ("/static/app.py", 404),
    ],
)
def test_head_is_get_without_the_body(fake: FakeServer, path: str, status: int):
    # One connection: what followed the headers would be taken for the beginning of the next answer.
    with httpx.Client(base_url=fake.url) as http:
        head, get, again = http.head(path), http.get(path), http.head(path)
    assert (head.status_code, get.status_code, again.status_code) == (status, status, status)
    assert head.content == b"" != get.content
    own = {"date", "x-request-id", "openai-processing-ms"}
    own |= {"content-length"} if path == "/metrics" else set()  # its numbers have grown
    headers = [{k: v for k, v in a.headers.items() if k not in own} for a in (head, get)]
    assert headers[0] == headers[1]


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/requests/x", "/v1/chat/completions", "/api/chat"]
)
def test_head_is_refused_where_an_answer_is_work(fake: FakeServer, path: str):
    answer = httpx.head(fake.url + path)
    assert (answer.status_code, answer.content) == (405, b"")
    assert answer.headers["allow"] in ("GET", "POST", "GET, POST")


QUERIED = [
    ("GET", "/v1/loads"),
    *(("GET", path) for path in ["/v1/models", "/v1/models/fake", "/v1/requests/x", "/api/tags"]),
    *(("GET", path) for path in ["/api/ps", "/api/version", "/v1/files", "/v1/files/x"]),
    *(("GET", path) for path in ["/v1/files/x/content", "/v1/batches", "/v1/batches/x"]),
    *(("GET", path) for path in ["/v1/responses/x", "/v1/responses/x/input_items"]),
    *(("GET", path) for path in ["/v1/chat/completions", "/v1/chat/completions/x"]),
    *(("GET", path) for path in ["/v1/chat/completions/x/messages"]),
    *(("DELETE", path) for path in ["/v1/files/x", "/v1/responses/x", "/v1/chat/completions/x"]),
    *(("POST", path) for path in ["/v1/responses/x/cancel", "/v1/batches/x/cancel"]),
]


def test_the_routes_whose_query_is_read_are_those_without_a_body(fake: FakeServer):
    listed = [(method, path.replace("/fake", "/x")) for method, path in QUERIED]
    documented = [
        (method.upper(), re.sub(r"{.*}", "x", path))
        for path, item in get(fake, "/openapi.json").json()["paths"].items()
        for method, operation in item.items()
        if "requestBody" not in operation and path.startswith(("/v1/", "/api/"))
    ]
    assert sorted(listed) == sorted(documented)


def test_models_come_in_pages_to_who_asks_for_pages(fake: FakeServer):
    """As anthropic's client does; who does not ask gets OpenAI's list."""
    assert set(get(fake, "/v1/models").json()) == {"object", "data"}
    names: list[str] = []
    page = get(fake, "/v1/models?limit=1").json()
    while True:
        names += [model["id"] for model in page["data"]]
        assert (page["first_id"], page["last_id"]) == (names[-1], names[-1])
        if not page["has_more"]:
            break
        page = get(fake, f"/v1/models?limit=1&after_id={page['last_id']}").json()
    assert names == ["fake", "alias"]


@pytest.mark.parametrize(("method", "path"), QUERIED)
def test_a_query_has_only_parameters_that_the_route_knows(fake: FakeServer, method: str, path: str):
    answer = httpx.request(method, f"{fake.url}{path}?colour=red")
    assert answer.status_code == 400, answer.text
    assert "`colour`" in answer.text and "remove it" in answer.text
    plain = httpx.request(method, fake.url + path)
    called = "api-version=1&beta=true&client_version=0.1"  # by clients of others
    described = httpx.request(method, f"{fake.url}{path}?{called}")
    contents = [re.sub(rb'"timestamp":"[^"]*"', b"", a.content) for a in (described, plain)]
    assert described.status_code == plain.status_code and contents[0] == contents[1]


@pytest.mark.parametrize("path", [*HEALTH, "/livez", "/", "/version", "/metrics", "/docs"])
def test_a_monitor_may_add_what_it_likes_to_its_query(fake: FakeServer, path: str):
    assert get(fake, f"{path}?time=1").status_code == 200


def test_the_root_says_who_answers(fake: FakeServer):
    answer = get(fake, "/")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == "Wavefill is running: see /docs\n"


@pytest.mark.parametrize("path", HEALTH)
def test_while_loading_a_probe_is_503_and_says_what_is_loaded(fake: FakeServer, path: str):
    fake.engine.ready = None
    fake.engine.progress = Progress("load weights", 3, 8)
    answer = get(fake, path)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "loading"
    assert "load weights 37 %" in answer.json()["error"]["message"]
    assert get(fake, "/livez").status_code == 200


@pytest.mark.parametrize("path", HEALTH)
def test_while_the_engine_is_down_a_probe_is_503_and_says_why(fake: FakeServer, path: str):
    fake.engine.ready = None
    fake.engine.down = "the engine process ended with signal SIGKILL"
    error = get(fake, path).json()["error"]
    assert error["code"] == "engine_down" and "SIGKILL" in error["message"]
    assert get(fake, "/livez").status_code == 200, "the launcher restarts it, not the probe"


@pytest.mark.parametrize("path", [*HEALTH, "/livez"])
def test_an_engine_that_has_fallen_silent_fails_every_probe(fake: FakeServer, path: str):
    fake.engine.down = "the engine has been silent for 31 s"  # FakeEngine.unhealthy() says it
    answer = get(fake, path)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_stalled"
    assert "silent for 31 s" in answer.json()["error"]["message"]


def test_server_info_reports_the_capacity_and_what_runs(fake: FakeServer):
    fake.engine.stats = Stats(running=3, pages_total=64)
    info = get(fake, "/server_info").json()
    assert info["version"] == version("wavefill")
    assert info["models"] == ["fake", "alias"]
    assert info["engine"]["num_pages"] * info["engine"]["page_size"] == 1024
    assert info["stats"]["running"] == 3


def test_capacity_and_load_have_the_names_that_routers_read(fake: FakeServer):
    fake.engine.stats = Stats(
        running=3,
        waiting=2,
        pages_used=16,
        pages_total=64,
        step_seconds=0.01,
        prompt_tokens=100,
        cached_tokens=25,
    )
    capacity = 64 * 16
    info = get(fake, "/server_info").json()
    assert info["max_total_num_tokens"] == capacity and info["max_running_requests"] == 64
    answer = get(fake, "/v1/loads?include=core,memory").json()
    assert answer["dp_rank_count"] == 1
    assert answer["loads"] == [
        {
            "dp_rank": 0,
            "num_running_reqs": 3,
            "num_waiting_reqs": 2,
            "num_total_reqs": 5,
            "num_used_tokens": 256,
            "max_total_num_tokens": capacity,
            "token_usage": 0.25,
            "gen_throughput": 300.0,
            "cache_hit_rate": 0.25,
            "utilization": 3 / 64,
            "max_running_requests": 64,
        }
    ]


def test_server_info_names_no_key_and_no_path(fake: FakeServer, tmp_path_factory):
    text = get(fake, "/server_info").text
    assert "key" not in text and str(tmp_path_factory.getbasetemp()) not in text


def test_version_is_that_of_the_distribution(fake: FakeServer):
    assert get(fake, "/version").json() == {"version": version("wavefill")}


def test_the_documentation_loads_nothing_from_another_host(fake: FakeServer):
    page = get(fake, "/docs").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert [link for link in links if "//" in link] == []
    assets = [link for link in links if link.startswith("static/")]
    assert len(assets) == 2
    for link in assets:
        asset = get(fake, f"/{link}")
        assert asset.status_code == 200 and len(asset.content) > 10_000
    assert "url: 'openapi.json'" in page


def test_static_gives_two_files_and_no_way_out(fake: FakeServer):
    for path in ("/static/LICENSE.swagger-ui", "/static/..%2Fapp.py", "/static/%2e%2e/app.py"):
        assert get(fake, path).status_code == 404, path


def test_a_trailing_slash_redirects_to_no_host_that_a_header_names(fake: FakeServer):
    answer = httpx.get(f"{fake.url}/v1/models/", headers={"host": "localhost:1"}, timeout=5)
    assert answer.status_code == 404 and "location" not in answer.headers


def test_openapi_describes_every_route_that_callers_use(fake: FakeServer):
    paths = get(fake, "/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"):
        assert path in paths


def test_promtool_finds_no_fault_in_the_native_metrics(fake: FakeServer):
    fake.client().completions.create(model="fake", prompt="Hello", max_tokens=3)
    text = get(fake, "/metrics").text
    native = "\n".join(line for line in text.splitlines() if "vllm:" not in line) + "\n"
    try:
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=native, capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("promtool is not installed")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
