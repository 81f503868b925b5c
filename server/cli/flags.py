"""Flags made from the fields of the configuration.

A flag beats WAVEFILL_*, that the file of --config, and that the default.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from runtime.config import EngineConfig
from server.cli.config_file import DEFAULT, NO_FILE, ConfigFile, load
from server.cli.main import UsageError
from server.cli.vllm_flags import replacement
from server.config import ServerConfig
from server.visible_gpus import VisibleDevicesError, expanded

PREFIX = "WAVEFILL_"
# `serve` reads them itself.
OTHER_VARIABLES = ("MODEL", "REVISION", "API_KEY", "API_KEY_FILE", "CONFIG")
MAX_ENGINES = 64
MAX_RANKS = 16
UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}

# Field -> help.  A field that is not here has no flag: the command derives it.
SERVER_FLAGS = {
    "host": "address to listen on; 0.0.0.0 accepts other machines",
    "port": "TCP port",
    "served_names": "name of the model in the API; several with commas",
    "chat_template": "file with a chat template, instead of the model's own",
    "special_tokens_in_content": "special tokens in messages: allow them, or take them as text",
    "tool_format": "how the model writes tool calls; auto: by its template; none: no tools",
    "reasoning_format": "how the model marks its reasoning; auto: by its template; none: as text",
    "api_workers": "HTTP server processes; add one when the first keeps a core busy",
    "max_queue": "sequences running or waiting before new requests get 429",
    "request_history": "requests in the log of GET /v1/requests/{id}, in each API process",
    "drain_delay": "seconds after SIGTERM in which requests are still served while /readyz is 503, "
    "so that load balancers notice before the port is closed",
    "drain_seconds": "seconds that open requests may take to finish once the port is closed",
    "stall_seconds": "seconds of silence of the engine until /health and /livez answer 503",
    "max_body_bytes": "largest request body",
    "max_header_bytes": "largest total size of request headers",
    "image_urls": "hosts that images are fetched from for callers: names with commas between them, "
    "*.NAME for all that end so, or any; without the option none are fetched",
    "limit_mm_per_prompt": "images of one request, for models that read images; image=0: serve "
    "the text model alone",
    "data_dir": "directory for files and batches, which are off without one",
    "max_file_bytes": "largest file that may be uploaded",
    "max_data_bytes": "largest total size of all files; uploads and batches stop at it",
    "batch_concurrency": "sequences of batches in the engine; at most half of --max-num-seqs",
    "root_path": "path prefix under which a proxy serves this server, such as /llm",
    "dashboard_keys": "names of the API keys that may watch /dashboard, which shows all requests; "
    "several with commas; without the option the only key may",
    "allowed_origins": "origins that browsers may call from (CORS); several with commas",
    "allowed_hosts": "values of the header Host to accept besides localhost, 127.0.0.1 and ::1; "
    "several with commas; * for all, as without the option where --host is no loopback address",
    "response_store": "file that stores /v1/responses and chats across restarts",
    "response_store_bytes": "largest size of that store; the least recently used are evicted",
    "response_store_days": "days that a response is kept after its last use",
    "metrics_compat": "also export metrics under the names of this server",
    "pooling": "pooling of embeddings; auto: as the model's files say, else the last token",
    "log_requests": "log a line for each request: who asked, how long it took, how it ended",
    "otlp_traces_endpoint": "URL of an OpenTelemetry collector (OTLP over HTTP) for traces of "
    "requests; needs wavefill[otel]",
    "log_level": "lowest level that is logged",
    "log_format": "form of the log",
}
ENGINE_FLAGS = {
    "device": "where to compute; auto: a GPU if there is one; CUDA_VISIBLE_DEVICES says which",
    "data_parallel": "engines with the whole model, each on a GPU of its own, behind one address; "
    "a request goes to the one that will have done its work first",
    "dtype": "type of weights and KV; auto takes the model's where the device is fast at it",
    "attention": "attention implementation; auto: flash2 on a GPU that can run it, else mha",
    "deterministic": "batch-invariant: answers do not depend on the batch; needs a GPU, is slower",
    "split_planner": "how flash2 divides the KV of decoding sequences; auto: stream-k",
    "kv_dtype": "type of stored keys and values; auto: as the weights",
    "calculate_kv_scales": "scales of fp8 keys and values from a prompt of random tokens at start, "
    "where the checkpoint has none; without it they are 1",
    "snapshot_every": "tokens of a prompt between two snapshots of recurrent states, which the "
    "prefix cache of models with such states needs (Qwen3.5, Qwen3-Next); at least 64",
    "snapshot_bytes": "host memory for them, of each engine and rank; 0: 4 GiB with a GPU, 1 GiB "
    "without, and at most half of what is free",
    "state_dtype": "type of recurrent states (Qwen3.5, Qwen3-Next); auto: float32",
    "quantization": "auto: run the weights as the checkpoint stores them; fp8: quantize those of "
    "an unquantized checkpoint to 8 bits while they are loaded",
    "load_format": "dummy fills the model with random weights, for benchmarks",
    "max_model_len": "maximum tokens of prompt and answer; 0 or auto: as long as the model "
    "and KV allow",
    "max_num_seqs": "sequences in one step; 0: 256 on a GPU, 64 on a CPU, at most one a token",
    "max_batched_tokens": "tokens in one step; 0: 8192 on a large GPU, else 2048, 512 on a CPU",
    "max_image_pixels": "pixels that the model sees of an image, which is scaled down to them; "
    "0: serve the text model alone",
    "itl_target_ms": "chunk prompts so that inter-token latency stays below this; 0: auto",
    "page_size": "tokens in one KV page: 16, 32, 64 or 128",
    "kv_tokens": "size of the KV cache in tokens; 0: as much as --gpu-memory allows",
    "gpu_memory": "fraction of the GPU's free memory to use; on a CPU, of half the free memory",
    "prefix_cache": "reuse prompt prefixes that were computed before",
    "threads": "compute threads on a CPU; 0: chosen from the number of cores",
    "tensor_parallel": "GPUs of this host, or processes on its CPU, that share the model: each has "
    "a part of every layer; auto (or 0): the fewest GPUs that hold it and some KV",
    "expert_parallel": "with --tensor-parallel: a GPU has whole experts, and not a part of each, "
    "as block-quantized experts need that cannot be cut",
    "disable_custom_all_reduce": "with --tensor-parallel: add what the GPUs have computed by NCCL, "
    "and not in the kernels of the norms, which are checked and timed against it at every start",
    "seed": "of the random numbers from which requests without a seed get one",
}
METAVARS = {
    "host": "ADDRESS",
    "served_names": "NAMES",
    "chat_template": "FILE",
    "tool_format": "NAME",
    "reasoning_format": "NAME",
    "image_urls": "HOSTS",
    "tensor_parallel": "{N,auto}",
    "limit_mm_per_prompt": "image=N",
    "data_dir": "DIRECTORY",
    "root_path": "PATH",
    "dashboard_keys": "NAMES",
    "allowed_origins": "ORIGINS",
    "allowed_hosts": "HOSTS",
    "response_store": "FILE",
    "otlp_traces_endpoint": "URL",
}
ALL_FLAGS = (*SERVER_FLAGS, *ENGINE_FLAGS)
# Further names of options, which users of other servers know.
ALIASES = {
    "data_parallel": ("--data-parallel-size", "-dp"),
    "tensor_parallel": ("--tensor-parallel-size", "-tp"),
    "expert_parallel": ("--enable-expert-parallel",),
}
RENAMED_OPTIONS = {"memory_fraction": "gpu_memory"}  # their old names are refused with the new one
# Numbers that may be written as auto, and how vLLM writes that, too.
MEANS_0 = {"tensor_parallel": ("auto",), "max_model_len": ("auto", "-1")}
# Old values, which commands and environment files of users may have, and vLLM's.
OTHER_VALUES = {
    "uneven": "stream-k",
    "fixed": "batch-invariant",
    "half": "float16",
    "float": "float32",
    "fp8": "fp8_e4m3",
}
# What other values of other servers are for.
NOTES = {
    "device": "; the variable CUDA_VISIBLE_DEVICES says which GPU",
    "load_format": "; auto reads safetensors",
    "quantization": "; auto runs a quantized checkpoint of any format as it is stored",
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a directory, a Hub id, or the built-in model (default: tiny-chat)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub model")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of the two tables."""
    _add_group(parser, "server", ServerConfig, SERVER_FLAGS)
    add_engine_flags(parser, ENGINE_FLAGS)


def add_engine_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add those of the engine that are named, and old names of theirs."""
    table = {name: ENGINE_FLAGS[name] for name in names}
    _add_group(parser, "engine", EngineConfig, table)
    for old, new in RENAMED_OPTIONS.items():
        if new in table:
            parser.add_argument(flag_of(old), dest=old, help=argparse.SUPPRESS)


def _add_group(
    parser: argparse.ArgumentParser,
    title: str,
    config: type[msgspec.Struct],
    table: Mapping[str, str],
) -> None:
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    defaults = {field.name: field.default for field in msgspec.structs.fields(config)}
    for name, text in table.items():
        options: dict[str, Any] = {}
        if get_origin(hints[name]) is Literal:
            # Not `choices`: the environment's values are checked here, too, and in the same words.
            options["metavar"] = "{" + ",".join(get_args(hints[name])) + "}"
        elif hints[name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            metavar = {int: "N", float: "X"}.get(hints[name], "TEXT")
            options["metavar"] = METAVARS.get(name, metavar)
        default = _format_default(name, defaults[name])
        if name != "served_names" and default != "":
            text += f" (default: {default})"
        text = text.replace("%", "%%")
        names = (flag_of(name), *ALIASES.get(name, ()))
        group.add_argument(*names, help=text, dest=name, default=None, **options)


def _format_default(name: str, default: Any) -> str:
    """A default in the form that an option takes; "" for none."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if name.endswith("_bytes") and default:
        size, unit = max((size, unit) for unit, size in UNITS.items() if default % size == 0)
        return f"{default // size}{unit}"
    return "" if default == () else f"{default:g}" if isinstance(default, float) else str(default)


def variables_for_cuda(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that uses CUDA.  Raises UsageError."""
    try:
        return {**environment, **expanded(environment)}
    except VisibleDevicesError as error:
        raise UsageError(str(error)) from None


def flag_of(name: str) -> str:
    return "--" + {"served_names": "served-model-name"}.get(name, name.replace("_", "-"))


def _variable(name: str) -> str:
    return PREFIX + flag_of(name)[2:].replace("-", "_").upper()


def read_config_file(args: argparse.Namespace, environment: Mapping[str, str]) -> ConfigFile:
    """The file of --config, all of whose names are options.  Raises UsageError."""
    options = (flag_of(name)[2:] for name in ALL_FLAGS)
    renamed = {flag_of(old)[2:]: flag_of(new)[2:] for old, new in RENAMED_OPTIONS.items()}
    return load(args, environment, options, renamed)


def read_flags(
    args: argparse.Namespace, environment: Mapping[str, str], file: ConfigFile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values that are set, for ServerConfig and EngineConfig.  Raises UsageError."""
    engine = read_engine_flags(args, environment, ENGINE_FLAGS, file)
    return _read(args, environment, file, ServerConfig, SERVER_FLAGS), engine


def read_engine_flags(
    args: argparse.Namespace,
    environment: Mapping[str, str],
    names: Iterable[str],
    file: ConfigFile = NO_FILE,
) -> dict[str, Any]:
    """The values of `names` that are set, for EngineConfig.  Raises UsageError."""
    names = tuple(names)
    for old, new in RENAMED_OPTIONS.items():
        variable = _variable(old)
        if new in names and (getattr(args, old) is not None or environment.get(variable)):
            raise UsageError(f"{flag_of(old)} ({variable}): its name is {flag_of(new)} now")
    values = _read(args, environment, file, EngineConfig, names)
    if not 0 < values.get("gpu_memory", 1.0) <= 1:
        raise UsageError(f"--gpu-memory {values['gpu_memory']}: it must be above 0 and at most 1")
    count, ranks = values.get("data_parallel", 1), values.get("tensor_parallel", 1)
    if not 1 <= count <= MAX_ENGINES:
        raise UsageError(f"--data-parallel {count}: choose from 1 to {MAX_ENGINES}")
    if ranks > MAX_RANKS:
        raise UsageError(f"--tensor-parallel {ranks}: choose from 1 to {MAX_RANKS}, or auto")
    if values.get("expert_parallel") and ranks == 1:
        raise UsageError(
            "--expert-parallel: experts are divided among the GPUs of --tensor-parallel N (or "
            "auto): add it, or leave this one out"
        )
    return values


def _read(
    args: argparse.Namespace,
    environment: Mapping[str, str],
    file: ConfigFile,
    config: type[msgspec.Struct],
    names: Iterable[str],
) -> dict[str, Any]:
    hints = get_type_hints(config)
    values: dict[str, Any] = {}
    for name in names:
        source, value = find_setting(name, args, environment, file, hints[name])
        if value in MEANS_0.get(name, ()):
            values[name] = 0
        elif value is not None:
            values[name] = _convert(source, value, hints[name], NOTES.get(name, ""))
    return values


def find_setting(
    name: str,
    args: argparse.Namespace,
    environment: Mapping[str, str],
    file: ConfigFile,
    hint: Any,
) -> tuple[str, Any]:
    """Where a value comes from and what is written there; (DEFAULT, None) if nowhere."""
    if (value := getattr(args, name)) is not None:
        return flag_of(name), value
    variable = _variable(name)
    value = environment.get(variable, "")
    # Empty is one of a file of variables that was left so, and tcp:// begins what Kubernetes sets
    # for a Service that is named "wavefill".
    if value.strip() and not value.startswith("tcp://"):
        return variable, value
    option = flag_of(name)[2:]
    value = file.get(option, hint)
    return (DEFAULT, None) if value is None else (file.source(option), value)


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What to do about each name that looks like ours and sets nothing.

    Those of Kubernetes' service links are left out.
    """
    known = [*OTHER_VARIABLES, *(_variable(name).removeprefix(PREFIX) for name in ALL_FLAGS)]
    found: dict[str, str] = {}
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name in (variable, *known) or name.startswith(("SERVICE_", "PORT_")):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        remedy = f"did you mean {PREFIX}{near[0]}?" if near else "see `wavefill serve --help`"
        found[variable] = replacement(name) or remedy
    return found


def _convert(source: str, value: Any, hint: Any, note: str) -> Any:
    """note: for who has chosen what there is not"""
    if not isinstance(value, str):
        return value
    if get_origin(hint) is Literal:
        choices: tuple[str, ...] = get_args(hint)
        found = value.lower()
        if found not in choices:
            found = OTHER_VALUES.get(found)
        if found not in choices:
            raise UsageError(f"{source} {value}: choose one of {', '.join(choices)}{note}")
        return found
    if hint is bool:
        if value.lower() not in ("1", "0", "true", "false", "on", "off", "yes", "no"):
            raise UsageError(f"{source} {value}: choose on or off")
        return value.lower() in ("1", "true", "on", "yes")
    if get_origin(hint) is tuple:
        return tuple(entry.strip() for entry in value.split(",") if entry.strip())
    if hint is int:
        return _integer(source, value)
    return _number(source, value) if hint is float else value


def _integer(source: str, value: str) -> int:
    """An integer, with k, m or g for powers of 1024: 32k is 32768."""
    found = re.fullmatch(r"(\d+)([kmg]?)", value.strip().lower())
    if found is None:
        raise UsageError(
            f"{source} {value}: a whole number from 0 up is needed, such as 4096 or 32k"
        )
    return int(found[1]) * UNITS[found[2]]


def _number(source: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise UsageError(f"{source} {value}: a number from 0 up is needed")
    return number
