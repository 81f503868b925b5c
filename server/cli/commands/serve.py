"""`wavefill serve [MODEL]`"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec

from msgspec.structs import replace

from runtime.config import ConfigError, EngineConfig, check_values
from runtime.logs import print_error
from server.cli.api_keys import read_keys
from server.cli.config_file import ConfigFile, add_config_argument, find_text
from server.cli.flags import (
    add_flags,
    add_model_arguments,
    find_setting,
    read_config_file,
    read_flags,
    unknown_variables,
    variables_for_cuda,
)
from server.cli.main import UsageError
from server.cli.model_source import BUILT_IN, find_local
from server.config import ServerConfig

log = logging.getLogger("wavefill.launcher")

PORT_IN_USE = 98  # exit code
MAX_API_WORKERS = 64
MIN_HEADER = 1024
MIN_BODY = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "wavefill serve [MODEL] [OPTIONS]"
    parser.description = (
        "Start the server.  Every option may also be set in the environment: --max-queue is "
        "WAVEFILL_MAX_QUEUE, and MODEL is WAVEFILL_MODEL; or in the file of --config, as "
        "max-queue and model.  Whole numbers may end in k, m or g: 32k is 32768.  `wavefill config "
        "--explain` says what is set, and where."
    )
    add_model_arguments(parser)
    add_config_argument(parser)
    parser.add_argument(
        "--api-key",
        action="append",
        default=None,
        metavar="KEY",
        help="require this key from clients; may be repeated (other users of this machine can read "
        "arguments: prefer WAVEFILL_API_KEY or --api-key-file)",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file with one key a line; # begins a comment"
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    from server.process.exclusive_files import LaunchError
    from server.process.launcher import launch
    from server.process.listener import AddressInUse, bind
    from server.process.logs import set_up_logging

    settings = read_config_file(args, os.environ)
    if str(find_setting("log_format", args, os.environ, settings, str)[1]).lower() == "json":
        set_up_logging("info", "json")  # also for what is wrong with other options
    config = requested_config(args, os.environ, settings)
    set_up_logging(config.log_level, config.log_format)
    try:
        listener = bind(config.host, config.port)
    except AddressInUse as error:
        print_error(str(error))
        return PORT_IN_USE
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise UsageError(
            f"--host {config.host} --port {config.port}: {reason}: choose an address of this "
            "machine and a port you may open"
        ) from None
    warn_if_open(config)
    for variable, remedy in unknown_variables(os.environ).items():
        log.warning("%s sets nothing: %s", variable, remedy)
    _, file = find_text("api-key-file", args, os.environ, settings)
    keys = partial(read_keys, args, os.environ, settings) if file else None
    with listener:
        try:
            local = find_local(config.engine.model)
            if local is not None:
                found = with_model(config, str(local[0]), local[1])
                return launch(found, listener, read_keys=keys)
            _, revision = find_text("revision", args, os.environ, settings)
            named = replace(config, served_names=config.served_names or (config.engine.model,))
            return launch(named, listener, revision=revision, read_keys=keys)
        except LaunchError as error:
            raise UsageError(str(error)) from None


def requested_config(
    args: argparse.Namespace, environment: Mapping[str, str], file: ConfigFile
) -> ServerConfig:
    """What flags, environment and file ask for; the model is not looked up yet.

    Raises UsageError.
    """
    server, engine = read_flags(args, environment, file)
    server.setdefault("served_names", ())
    model = find_text("model", args, environment, file)[1] or BUILT_IN
    config = ServerConfig(
        **server,
        api_keys=read_keys(args, environment, file),
        engine=EngineConfig(model=model, **engine),
    )
    if not config.host.strip():  # bind() would take all addresses
        raise UsageError(
            "--host: it is empty: give an address, 0.0.0.0 for all, or leave the option out"
        )
    if not 1 <= config.port <= 65535:
        raise UsageError(f"--port {config.port}: ports run from 1 to 65535")
    if not 1 <= config.api_workers <= MAX_API_WORKERS:
        raise UsageError(
            f"--api-workers {config.api_workers}: choose from 1 to {MAX_API_WORKERS}, at most one "
            "for each core"
        )
    for name in config.served_names:
        if config.served_names.count(name) > 1:
            raise UsageError(f"--served-model-name: {name!r} is there twice: remove one")
    _check_engines(config.engine)
    _check_formats(config)
    _check_limits(config)
    _check_dashboard_keys(config)
    _check_tracing(config.otlp_traces_endpoint)
    config = _checked_images(config)
    if config.batch_concurrency < 1:
        raise UsageError("--batch-concurrency 0: batches need at least 1")
    if config.max_file_bytes < 1 or config.max_file_bytes > config.max_data_bytes:
        raise UsageError(
            f"--max-file-bytes {config.max_file_bytes}: choose from 1 to --max-data-bytes "
            f"({config.max_data_bytes})"
        )
    if config.chat_template and not os.path.isfile(config.chat_template):
        raise UsageError(
            f"--chat-template {config.chat_template[:200]}: no such file: give a file with a Jinja "
            "template, or leave the option out to use the model's own"
        )
    return config


def _check_engines(engine: EngineConfig) -> None:
    from server.process.engine_process import num_gpus

    try:
        check_values(engine)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    count, ranks = engine.data_parallel, engine.tensor_parallel
    if engine.device != "cpu":
        variables_for_cuda(os.environ)  # what the engines will get can be read
    gpus = num_gpus() if engine.device != "cpu" and max(count, ranks) > 1 else None
    if gpus is not None and ranks > 1 and count * ranks > gpus > 0:
        engines = f"--data-parallel {count} with " if count > 1 else ""
        raise UsageError(
            f"{engines}--tensor-parallel {ranks}: each rank has a GPU of its own, and there are "
            f"{gpus} here (CUDA_VISIBLE_DEVICES may list fewer than the host has): "
            f"{count * ranks} are needed: lower it, or choose --device cpu"
        )
    if gpus is not None and count > gpus:
        raise UsageError(
            f"--data-parallel {count}: each engine has a GPU of its own, and there are {gpus} here "
            "(CUDA_VISIBLE_DEVICES may list fewer than the host has): choose at most so many, or "
            "--device cpu"
        )


def _check_limits(config: ServerConfig) -> None:
    from server.http.access import split_host

    if config.max_queue < 1:
        raise UsageError("--max-queue 0: every request would be rejected: choose at least 1")
    if config.stall_seconds < 1:
        raise UsageError(
            f"--stall-seconds {config.stall_seconds:g}: a step may take longer than that, and "
            "/livez would ask for a restart: choose at least 1"
        )
    if config.max_body_bytes < MIN_BODY:
        raise UsageError(
            f"--max-body-bytes {config.max_body_bytes}: no request is so short: choose at least "
            f"{MIN_BODY}"
        )
    if config.max_header_bytes < MIN_HEADER:
        raise UsageError(
            f"--max-header-bytes {config.max_header_bytes}: ordinary clients send about 500: "
            f"choose at least {MIN_HEADER}"
        )
    if config.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", config.root_path):
        raise UsageError(
            f"--root-path {config.root_path}: a path such as /llm or /team/llm is needed, with a "
            "slash in front and none at the end"
        )
    for origin in config.allowed_origins:
        if origin not in ("*", "null") and not re.fullmatch(
            r"[a-z][a-z0-9+.-]*://[^/\s\"'\]]+", origin
        ):
            raise UsageError(
                f"--allowed-origins {origin}: an origin is like https://example.com, without a "
                "path; several with commas; * for all"
            )
    for host in config.allowed_hosts:
        if host != "*" and split_host(host) is None:
            raise UsageError(
                f"--allowed-hosts {host}: a host is a name or an address, with or without a port, "
                "like llm.example or 10.0.0.5:8000; several with commas; * for all"
            )


def _check_dashboard_keys(config: ServerConfig) -> None:
    from server.http.access import ApiKeys

    known = ApiKeys(config.api_keys).names()
    for name in config.dashboard_keys:
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has none"
            raise UsageError(
                f"--dashboard-keys {name}: no API key has this name, the server {has}: name a key "
                "in --api-key-file by a line NAME KEY"
            )


def _check_tracing(endpoint: str) -> None:
    if not endpoint:
        return
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise UsageError(
            f"--otlp-traces-endpoint {endpoint}: a URL of OTLP over HTTP is needed, such as "
            "http://127.0.0.1:4318"
        )
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UsageError(
            "--otlp-traces-endpoint: OpenTelemetry is not installed: pip install 'wavefill[otel]'"
        )


def _checked_images(config: ServerConfig) -> ServerConfig:
    from server.images.options import OptionError, check_options, without_unused_encoder

    try:
        check_options(config)
        return without_unused_encoder(config)
    except OptionError as error:
        raise UsageError(str(error)) from None


def _check_formats(config: ServerConfig) -> None:
    from server.tool_calls.formats import UnknownFormat, detect

    for option, formats in (
        ("--tool-format", {"tools": config.tool_format}),
        ("--reasoning-format", {"reasoning": config.reasoning_format}),
    ):
        try:
            detect(None, **formats)
        except UnknownFormat as error:
            raise UsageError(f"{option}: {error}, or auto or none") from None


def with_model(config: ServerConfig, directory: str, name: str) -> ServerConfig:
    return replace(
        config,
        served_names=config.served_names or (name,),
        model_directory=directory,
        engine=replace(config.engine, model=directory),
    )


def warn_if_open(config: ServerConfig) -> None:
    """Warn if other machines, or any web page in a browser, can use the server without a key."""
    from server.http.access import accepted_hosts, is_loopback

    if config.api_keys:
        return
    if not is_loopback(config.host):
        log.warning(
            "listening on %s without a key: everyone who reaches this machine can use it; "
            "set WAVEFILL_API_KEY",
            config.host,
        )
    if accepted_hosts(config) is None:
        log.warning(
            "any Host is answered without a key: a web page whose name is made to resolve to this "
            "machine (DNS rebinding) can use it; set --allowed-hosts or WAVEFILL_API_KEY"
        )
