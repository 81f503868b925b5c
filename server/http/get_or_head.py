"""Routes that a load balancer or a client asks with HEAD before it asks for anything else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter

Answer = TypeVar("Answer", bound=Callable[..., Awaitable[Any]])


def get_or_head(
    router: APIRouter, path: str, *, summary: str = "", shown: bool = True, **documented: Any
) -> Callable[[Answer], Answer]:
    """GET, and HEAD with the same status and headers: the connection leaves the body out.

    For what is answered at once: a HEAD costs as much as its GET.

    shown       in the OpenAPI document
    documented  what else the document is told of the GET
    """

    def register(answer: Answer) -> Answer:
        options: dict[str, Any] = {"summary": summary, "response_model": None}
        router.get(path, include_in_schema=shown, **options, **documented)(answer)
        router.head(path, include_in_schema=False, **options)(answer)
        return answer

    return register
