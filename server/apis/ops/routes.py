"""What operators, probes and browsers ask: health, readiness, version, metrics, documentation."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import orjson
from fastapi.openapi.docs import get_swagger_ui_html
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from runtime.messages import Ready
from runtime.stats import Stats
from server.engine import engine_state
from server.errors import SERVER_ERROR, NotFound, RequestError, error_body
from server.generation.generation import require_ready
from server.http.endpoints import Endpoints
from server.http.json_body import JsonBody
from server.http.openapi_parts import ANY_OBJECT, COUNT, TEXT, list_of, object_of, word
from server.http.query import parse_query
from server.http.request_context import note_error
from server.http.validation import Body
from server.metrics.metrics import CONTENT_TYPE
from server.state import ServerState, state_of

endpoints = Endpoints("operation")
STATUS = object_of(status=word("ok", "degraded"))
SERVER_INFO = object_of(
    version=TEXT,
    models=list_of(TEXT),
    served_model_name=TEXT,
    max_total_num_tokens=COUNT,
    max_running_requests=COUNT,
    context_length=COUNT,
    page_size=COUNT,
    engine=ANY_OBJECT,
    stats=ANY_OBJECT,
)
LOADS = object_of(timestamp=TEXT, version=TEXT, dp_rank_count=COUNT, loads=list_of(ANY_OBJECT))
STATIC = Path(__file__).parent / "static"
ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css")
OK = b'{"status":"ok"}'
READY = "Whether requests are answered now"


def _unavailable(message: str, code: str) -> Response:
    note_error(code)
    return JsonBody(error_body(message, SERVER_ERROR, None, code), 503, {"retry-after": "2"})


def _progress(state: ServerState) -> Response:
    """200 unless the engine has stalled; of several, unless all have."""
    problem = state.client.unhealthy()
    if problem is not None:
        return _unavailable(problem, "engine_stalled")
    states = [engine_state(engine) for engine in state.client.engines]
    if len(states) == 1 or all(each == "ready" for each in states):
        return JsonBody(OK)
    # It answers, with fewer engines than it has.
    return JsonBody(orjson.dumps({"status": "degraded", "engines": states}))


@endpoints.get("/health", summary=READY, head=True, answer=STATUS)
@endpoints.get("/readyz", summary=READY, head=True, answer=STATUS)
@endpoints.get("/ready", summary=READY, head=True, answer=STATUS)
@endpoints.get("/ping", summary=READY, head=True, answer=STATUS)
async def ready(request: Request) -> Response:
    """Whether this server answers requests now."""
    if request.app.state.drain_state.draining:
        return _unavailable("the server is shutting down", "draining")
    state = state_of(request)
    try:
        require_ready(state)
    except RequestError as error:
        note_error(error.code)
        return JsonBody(error.body(), 503, error.headers())
    return _progress(state)


@endpoints.get(
    "/livez", summary="Whether this process should be left alone", head=True, answer=STATUS
)
async def live(request: Request) -> Response:
    """Whether to leave this process alone: loading, draining and load are no reason to kill it."""
    state = state_of(request)
    return JsonBody(OK) if state.client.ready is None else _progress(state)


@endpoints.get("/version", summary="Wavefill's version", head=True, answer=object_of(version=TEXT))
async def show_version() -> Response:
    return JsonBody(orjson.dumps({"version": version("wavefill")}))


@endpoints.get(
    "/server_info", summary="What runs, on what, and how much fits", head=True, answer=SERVER_INFO
)
async def server_info(request: Request) -> Response:
    """What runs here, on what, and how much fits."""
    state = state_of(request)
    ready = require_ready(state)
    fields = {
        "version": version("wavefill"),
        "models": state.config.served_names,
        # SGLang's names, by which routers such as smg read a replica's capacity.
        "served_model_name": state.config.served_names[0],
        "max_total_num_tokens": ready.capacity_tokens,
        "max_running_requests": ready.max_num_seqs,
        "context_length": ready.max_model_len,
        "page_size": ready.page_size,
        "engine": asdict(ready),
        "stats": asdict(state.client.stats),
    }
    return JsonBody(orjson.dumps(fields))


class LoadsQuery(Body):
    """SGLang's: further sections of each entry, of which there are none here."""

    include: list[str] | None = None


@endpoints.get(
    "/v1/loads",
    summary="The load and the capacity, in SGLang's form",
    head=True,
    query=LoadsQuery,
    answer=LOADS,
)
async def loads(request: Request) -> Response:
    """What routers such as smg poll to choose a replica."""
    parse_query(LoadsQuery, request.query_params)
    state = state_of(request)
    require_ready(state)
    engines = [each for each in state.client.engines if each.ready is not None]
    fields = {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": version("wavefill"),
        "dp_rank_count": len(state.client.engines),
        "loads": [_load(each.index, each.ready, each.stats) for each in engines if each.ready],
    }
    return JsonBody(orjson.dumps(fields))


def _load(index: int, ready: Ready, stats: Stats) -> dict[str, object]:
    """Of one engine."""
    prompt, busy = stats.prompt_tokens, stats.step_seconds and stats.running / stats.step_seconds
    return {
        "dp_rank": index,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "num_used_tokens": stats.pages_used * ready.capacity_tokens // ready.num_pages,
        "max_total_num_tokens": ready.capacity_tokens,
        "token_usage": stats.pages_used / stats.pages_total if stats.pages_total else 0.0,
        "gen_throughput": busy,  # tokens a second if all steps were as long as the last one
        "cache_hit_rate": stats.cached_tokens / prompt if prompt else 0.0,
        "utilization": stats.running / ready.max_num_seqs,
        "max_running_requests": ready.max_num_seqs,
    }


@endpoints.get(
    "/metrics", summary="Figures for Prometheus", head=True, answer=TEXT, media_type="text/plain"
)
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    text = await asyncio.to_thread(state_of(request).metrics.render)
    return Response(text, headers={"content-type": CONTENT_TYPE})


@endpoints.undocumented("/docs")
async def docs() -> HTMLResponse:
    """Swagger UI from our own files: it works without a network, and under a proxy's prefix."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Wavefill API",
        swagger_js_url=f"static/{ASSETS[0]}",
        swagger_css_url=f"static/{ASSETS[1]}",
        swagger_favicon_url="data:,",
    )


@endpoints.undocumented("/static/{name}")
async def static(name: str) -> Response:
    if name not in ASSETS:
        raise NotFound("there is no such file: /docs is the page", code="not_found")
    return FileResponse(STATIC / name, headers={"cache-control": "max-age=86400"})
