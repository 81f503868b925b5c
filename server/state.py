"""The state that all routes of an API process share."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import Request

from runtime.messages import BACKGROUND
from server.apis.media import Readable
from server.apis.responses.store import ResponseStore
from server.batches.store import BatchStore
from server.config import ServerConfig
from server.constrained.grammar_client import GrammarChecker
from server.constrained.grammar_text import GrammarLiterals
from server.dashboard.feed import DashboardFeed
from server.engine import Engine
from server.errors import FieldPath, NotFound
from server.generation.admission import Admission
from server.generation.request_log import RequestLog
from server.loaded_model import LoadedModel, loading
from server.metrics.metrics import Metrics
from server.prompt.tokenizer import ChatTokenizer
from server.telemetry.requests import Tracing
from server.tool_calls.output_parser import OutputFormats

if TYPE_CHECKING:
    from server.images.limits import ImageLimits
    from server.images.reader import ImageReader


@dataclass(frozen=True)
class ServerState:
    config: ServerConfig
    client: Engine
    model: LoadedModel
    metrics: Metrics
    requests: RequestLog = field(default_factory=RequestLog)
    # Of batch lines, which are so many that they would displace all others.
    batch_requests: RequestLog = field(default_factory=RequestLog)
    responses: ResponseStore = field(default_factory=ResponseStore)
    batches: BatchStore | None = None
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    tracing: Tracing | None = None  # None: there are no traces
    bounded: bool = True  # False for lines of batches: they do not count against --max-queue
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Raises Unavailable until it is loaded."""
        if self.model.tokenizer is None:
            raise loading(self.client)
        return self.model.tokenizer

    @cached_property
    def admission(self) -> Admission:
        config = self.config
        return Admission(
            self.client, limit=config.max_queue, share=config.queue_share, bounded=self.bounded
        )

    @cached_property
    def dashboard(self) -> DashboardFeed:
        return DashboardFeed(
            self.config, self.client, self.metrics, self.requests, self.batch_requests
        )

    @cached_property
    def formats(self) -> OutputFormats:
        """How the model writes reasoning and tool calls."""
        config = self.config
        return OutputFormats.of(self.tokenizer, config.tool_format, config.reasoning_format)

    @cached_property
    def grammar_literals(self) -> GrammarLiterals:
        """The special tokens as parts of grammars."""
        return GrammarLiterals(self.tokenizer.special_words(), self.tokenizer.added_words())

    @property
    def readable(self) -> Readable:
        name, refused = self.config.served_names[0], self.metrics.image_refused
        switched_off = self.config.engine.max_image_pixels == 0
        return Readable(name, self.images is not None, refused, switched_off)

    @property
    def images(self) -> ImageReader | None:
        """What reads images for the model; None: it reads text only.

        The files of a model may describe images that its engine does not take.  Until there is an
        engine to say so, requests wait for it, not for their images.
        """
        ready = self.client.ready
        return self.model.images if ready is None or ready.reads_images else None

    @property
    def vision(self) -> ImageLimits | None:
        """What the model reads of images; None: nothing."""
        return None if self.images is None else self.images.limits

    def check_model(self, name: str) -> None:
        """Raises NotFound unless the name is one that this server serves."""
        if name not in self.config.served_names:
            served = ", ".join(f"`{known}`" for known in self.config.served_names)
            raise NotFound(
                "the model `{}` does not exist here: this server has {}",
                (name[:100], served),
                param=FieldPath("model"),
                code="model_not_found",
            )

    def priority(self, asked: int | None) -> int:
        """Of a request in the engine; lines of batches run after all others."""
        return (asked or 0) if self.bounded else BACKGROUND

    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: equal for answers of an equal back end."""
        ready = self.client.ready
        parts = [] if ready is None else [ready.device, ready.dtype, ready.attention]
        text = "/".join([self.config.served_names[0], *parts])
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.wavefill
    return state
