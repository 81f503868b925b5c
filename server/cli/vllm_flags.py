"""Error messages for unknown options: the equivalent of ours, or the closest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ONE_GPU = "leave it out, or use --tensor-parallel, which divides a model among GPUs"
NEEDLESS = "leave it out"

# Options of vLLM and SGLang -> what to do instead.
REMEDIES = {
    "allowed-local-media-path": "upload files to /v1/files, see --data-dir",
    "allowed-media-domains": "use --image-urls",
    "api-server-count": "use --api-workers",
    "attention-backend": "use --attention",
    "block-size": "use --page-size",
    "chunked-prefill-size": "use --max-batched-tokens, or --itl-target-ms",
    "context-length": "use --max-model-len",
    "cpu-offload-gb": f"{NEEDLESS}, weights stay on the device",
    "disable-log-requests": f"{NEEDLESS}, requests are logged with --log-requests only",
    "disable-log-stats": "use --log-level warning",
    "disable-radix-cache": "use --no-prefix-cache",
    "download-dir": "set the variable HF_HOME",
    "dp-size": "use --data-parallel",
    "enable-auto-tool-choice": f"{NEEDLESS}, tools need no switch",
    "enable-chunked-prefill": f"{NEEDLESS}, prompts are always cut, or use --max-batched-tokens",
    "enable-log-requests": "use --log-requests",
    "enable-lora": "merge adapters into the weights",
    "enable-prefix-caching": f"{NEEDLESS}, it is on",
    "enable-reasoning": f"{NEEDLESS}, reasoning needs no switch",
    "ep-size": "use --tensor-parallel with --expert-parallel",
    "enforce-eager": f"{NEEDLESS}, graphs are made while the server answers",
    "generation-config": f"{NEEDLESS}, the model's generation_config.json is followed",
    "gpu-memory-utilization": "use --gpu-memory, a share of the memory that is free",
    "hf-token": "set the variable HF_TOKEN",
    "kv-cache-dtype": "use --kv-dtype",
    "language-model-only": "use --limit-mm-per-prompt image=0",
    "lora-modules": "merge adapters into the weights",
    "lora-paths": "merge adapters into the weights",
    "max-num-batched-tokens": "use --max-batched-tokens",
    "max-running-requests": "use --max-num-seqs",
    "mem-fraction-static": "use --gpu-memory, a share of the memory that is free",
    "model": "write wavefill serve MODEL",
    "model-path": "write wavefill serve MODEL",
    "no-enable-prefix-caching": "use --no-prefix-cache",
    "pipeline-parallel-size": ONE_GPU,
    "random-seed": "use --seed",
    "reasoning-parser": "use --reasoning-format, if the chat template does not tell",
    "scheduling-policy": f"{NEEDLESS}, priorities always count",
    "speculative-config": f"{NEEDLESS}, there is no speculative decoding",
    "ssl-certfile": "let a proxy in front speak TLS",
    "ssl-keyfile": "let a proxy in front speak TLS",
    "swap-space": f"{NEEDLESS}, KV stays on the device",
    "tokenizer": "put tokenizer.json into the model's directory",
    "tokenizer-path": "put tokenizer.json into the model's directory",
    "tool-call-parser": "use --tool-format, if the chat template does not tell",
    "tp": "use --tensor-parallel",
    "tp-size": "use --tensor-parallel",
    "trust-remote-code": f"{NEEDLESS}, code of a checkpoint is never run",
    "uvicorn-log-level": "use --log-level",
}


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
    if command == "wavefill serve" and name in REMEDIES:
        return f"{start}: {REMEDIES[name]}"
    near = difflib.get_close_matches(f"--{name}", known, n=1, cutoff=0.75)
    if near:
        return f"{start}: did you mean {near[0]}?"
    return f"{start}: see `{command} --help`"
