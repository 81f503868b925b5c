"""Who may watch: the dashboard shows requests of all API keys, if never their content."""

from __future__ import annotations

from starlette.requests import Request

from server.errors import Forbidden
from server.http.request_context import KEY_NAME
from server.state import state_of


def check_may_watch(request: Request) -> None:
    """Raises Forbidden, unless there are no keys, one key, or this one is in --dashboard-keys."""
    config = state_of(request).config
    name: str | None = request.scope.get("state", {}).get(KEY_NAME)
    if name is None or name in config.dashboard_keys:
        return
    if not config.dashboard_keys and len(request.app.state.api_keys.names()) == 1:
        return
    chosen = "it names other keys" if config.dashboard_keys else "it is not set"
    raise Forbidden(
        "the dashboard shows the requests of all API keys, and the key `{}` may not watch it: "
        "--dashboard-keys names those that may, and {}",
        (name, chosen),
        code="dashboard_not_allowed",
    )
