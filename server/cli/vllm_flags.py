"""Error messages for unknown options: the equivalent of ours, or the closest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

NEEDLESS = "leave it out"

# What to do instead of options of vLLM, SGLang and llama.cpp, whose names follow.
_OPTIONS = {
    "use --allowed-origins": "allow-credentials allowed-headers allowed-methods",
    "use --api-workers": "api-server-count",
    "use --attention": "attention-backend fa flash-attn",
    "use --chat-template": "chat-template-file",
    "use --data-dir": "file-storage-path",
    "use --data-parallel": "dp dp-size",
    "use --deterministic": "enable-deterministic-inference",
    "use --gpu-memory, a share of the memory that is free": "gpu-memory-utilization "
    "mem-fraction-static",
    "use --image-urls": "allowed-media-domains",
    "use --kv-dtype": "cache-type-k cache-type-v ctk ctv kv-cache-dtype",
    "use --kv-tokens": "kv-cache-memory-bytes max-total-tokens num-gpu-blocks-override",
    "use --limit-mm-per-prompt image=0": "language-model-only",
    "use --log-level": "log-level-http uvicorn-log-level",
    "use --log-level debug": "v verbose",
    "use --log-level warning": "disable-log-stats",
    "use --log-requests": "enable-log-requests",
    "use --max-batched-tokens": "b batch-size max-num-batched-tokens max-prefill-tokens ub "
    "ubatch-size",
    "use --max-batched-tokens, or --itl-target-ms": "chunked-prefill-size",
    "use --max-model-len": "context-length",
    "use --max-model-len, or --kv-tokens for all requests together": "c ctx-size",
    "use --max-num-seqs": "max-running-requests np parallel",
    "use --max-queue": "max-queued-requests",
    "use --no-prefix-cache": "disable-radix-cache no-cache-prompt no-enable-prefix-caching",
    "use --page-size": "block-size",
    "use --quantization": "q",
    "use --reasoning-format, if the chat template does not tell": "reasoning-parser",
    "use --seed": "random-seed s",
    "use --served-model-name": "a alias",
    "use --stall-seconds": "watchdog-timeout",
    "use --tensor-parallel": "split-mode sm tensor-split tp tp-size ts",
    "use --tensor-parallel with --expert-parallel": "ep ep-size expert-parallel-size",
    "use --threads": "t tb threads-batch",
    "use --tool-format, if the chat template does not tell": "tool-call-parser",
    "write {command} MODEL": "hf hf-repo m model model-path",
    "set the variable CUDA_VISIBLE_DEVICES": "base-gpu-id main-gpu mg",
    "set the variable HF_HOME": "download-dir",
    "set the variable HF_TOKEN": "hf-token",
    "change config.json in a copy of the model's directory": "hf-overrides "
    "json-model-override-args rope-scaling rope-theta",
    "let a proxy in front speak TLS": "ssl-cert-file ssl-certfile ssl-key-file ssl-keyfile",
    "merge adapters into the weights": "enable-lora lora lora-modules lora-paths",
    "put tokenizer.json into the model's directory": "tokenizer tokenizer-path",
    "send it with requests": "min-p n n-predict override-generation-config predict temp "
    "temperature top-k top-p",
    "start a server on each host": "dist-init-addr nnodes node-rank",
    "upload files to /v1/files, see --data-dir": "allowed-local-media-path",
    f"{NEEDLESS}, /metrics is always there": "enable-metrics metrics",
    f"{NEEDLESS}, /v1/embeddings is always there": "convert embedding embeddings is-embedding "
    "runner task",
    f"{NEEDLESS}, chat templates are always rendered": "jinja",
    f"{NEEDLESS}, code of a checkpoint is never run": "trust-remote-code",
    f"{NEEDLESS}, graphs are made while the server answers": "cc compilation-config "
    "cuda-graph-max-bs disable-cuda-graph enforce-eager",
    f"{NEEDLESS}, it is on": "cb cont-batching enable-prefix-caching",
    f"{NEEDLESS}, it is on with a GPU": "async-scheduling",
    f"{NEEDLESS}, layers are all on the device": "gpu-layers n-gpu-layers ngl",
    f"{NEEDLESS}, or use --tensor-parallel, which divides a model among GPUs": "pipeline-parallel-"
    "size pp pp-size",
    f"{NEEDLESS}, priorities always count": "scheduling-policy",
    f"{NEEDLESS}, prompts are always cut, or use --max-batched-tokens": "enable-chunked-prefill",
    f"{NEEDLESS}, reasoning needs no switch": "enable-reasoning",
    f"{NEEDLESS}, requests are logged with --log-requests only": "disable-log-requests "
    "disable-uvicorn-access-log",
    f"{NEEDLESS}, structured output needs no choice": "grammar-backend guided-decoding-backend "
    "structured-outputs-config",
    f"{NEEDLESS}, the model's files are followed": "mmproj tokenizer-mode",
    f"{NEEDLESS}, the model's generation_config.json is followed": "generation-config",
    f"{NEEDLESS}, there is no speculative decoding": "md model-draft speculative-algorithm "
    "speculative-config speculative-model",
    f"{NEEDLESS}, tools need no switch": "enable-auto-tool-choice",
    f"{NEEDLESS}, usage always has it": "enable-cache-report enable-prompt-tokens-details",
    f"{NEEDLESS}, weights and KV stay on the device": "cpu-offload-gb mlock no-mmap swap-space",
}
REMEDIES = {name: remedy for remedy, names in _OPTIONS.items() for name in names.split()}
# Commands of Ollama, vLLM and SGLang, and what users may take them for.
OTHER_COMMANDS = {
    "collect-env": "doctor",
    "complete": "chat",
    "delete": "rm",
    "download": "pull",
    "launch": "serve",
    "list": "ls",
    "remove": "rm",
    "run": "chat",
    "start": "serve",
}
SERVER_COMMANDS = ("wavefill serve", "wavefill config", "wavefill plan")


def replacement(name: str) -> str:
    """What to do instead of the option `name` of another server, to start one; "" if unknown."""
    return REMEDIES.get(name.lower().replace("_", "-"), "").format(command="wavefill serve")


def refusal(words: Iterable[str], known: Iterable[str], command: str) -> str:
    """The error for `words` that the parser of `command` does not know; `known` are its options.

    Words after an unknown option are not reported: they may be its values.
    """
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not options:
        return (
            f"{' '.join(words)}: one argument too many (lists have commas): see `{command} --help`"
        )
    known = tuple(known)
    lines = [f"{option}: {_remedy(option, known, command)}" for option in options]
    return "\n       ".join(dict.fromkeys(lines))


def _remedy(option: str, known: tuple[str, ...], command: str) -> str:
    name = option.lstrip("-").replace("_", "-")
    if f"--{name}" in known:
        return f"write --{name}"
    start = f"not an option of {command}"
    remedy = REMEDIES.get(name, "")
    ours = set(re.findall(r"--[a-z-]+", remedy))
    if ours <= set(known) and (ours or (remedy and command in SERVER_COMMANDS)):
        return f"{start}: {remedy.format(command=command)}"
    near = difflib.get_close_matches(f"--{name}", known, n=1, cutoff=0.75)
    if near:
        return f"{start}: did you mean {near[0]}?"
    return f"{start}: see `{command} --help`"
