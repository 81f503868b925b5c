"""ServerConfig: the options of the server, including the EngineConfig."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from runtime.config import EngineConfig

LogLevel = Literal["debug", "info", "warning", "error"]


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Travels as JSON from the launcher to the API processes."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ("tiny-chat",)  # the first one is reported in answers
    model_directory: str = ""
    chat_template: str = ""  # a file that takes the place of the model's own template
    special_tokens_in_content: Literal["allow", "text"] = "allow"  # those that messages spell
    tool_format: str = "auto"  # how the model writes calls; none: they are text
    reasoning_format: str = "auto"
    api_workers: int = 1  # API processes; they share the port and the engine
    max_queue: int = 1024  # sequences running or waiting, in all API processes together
    request_history: int = 1000  # requests that GET /v1/requests/{id} knows
    drain_delay: float = 0.0  # from SIGTERM until the port is closed
    drain_seconds: float = 30.0
    stall_seconds: float = 30.0
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    image_urls: str = ""  # hosts that images are fetched from, "any", or ""
    limit_mm_per_prompt: str = "image=16"
    data_dir: str = ""  # files and batches are off without it
    max_file_bytes: int = 200 << 20
    max_data_bytes: int = 16 << 30
    batch_concurrency: int = 32
    root_path: str = ""  # the prefix of a proxy, as /llm
    dashboard_keys: tuple[str, ...] = ()  # names of keys; (): the only one
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # in addition to those of a loopback address
    response_store: str = ""  # a file; "": a temporary one
    response_store_bytes: int = 256 << 20
    response_store_days: float = 30.0  # without use
    metrics_compat: Literal["vllm", "none"] = "vllm"
    pooling: Literal["auto", "last", "mean"] = "auto"  # of embeddings; auto: as the model says
    log_requests: bool = False  # one line a request
    otlp_traces_endpoint: str = ""  # URL of a collector; "": no traces
    log_level: LogLevel = "info"
    log_format: Literal["text", "json"] = "text"
    engine: EngineConfig = EngineConfig(model="tiny-chat")

    @property
    def queue_share(self) -> int:
        """The part of `max_queue` of one API process, which does not know what others admit."""
        return -(-self.max_queue // self.api_workers)

    def __repr__(self) -> str:
        """Without the keys: a configuration may be logged."""
        return f"ServerConfig({self.host}:{self.port}, {self.model_directory or self.engine.model})"
