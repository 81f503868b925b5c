"""Options, values and variables that are wrong or belong to other servers."""

from __future__ import annotations

import re

import pytest

from server.cli.commands import serve
from server.cli.flags import (
    ENGINE_FLAGS,
    SERVER_FLAGS,
    unknown_variables,
)
from server.cli.main import Parser, UsageError, main
from server.cli.vllm_flags import REMEDIES
from tests.support.cli.command import config


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--port", "many"], {}, "--port many: a whole number from 0 up is needed"),
        (["--api-workers", "0"], {}, "--api-workers 0: choose from 1 to 64"),
        (["-dp", "0"], {}, "--data-parallel 0: choose from 1 to 64"),
        (["--data-parallel-size", "65"], {}, "--data-parallel 65: choose from 1 to 64"),
        (["-tp", "17"], {}, "--tensor-parallel 17: choose from 1 to 16, or auto"),
        (["-tp", "all"], {}, "--tensor-parallel all: a whole number from 0 up is needed"),
        (["--port", "70000"], {}, "--port 70000: ports run from 1 to 65535"),
        (["--drain-seconds", "nan"], {}, "--drain-seconds nan: a number from 0 up"),
        (["--root-path", "llm/"], {}, "--root-path llm/: a path such as /llm or /team/llm"),
        (["--drain-delay", "nan"], {}, "--drain-delay nan: a number from 0 up"),
        (["--batch-concurrency", "0"], {}, "--batch-concurrency 0: batches need"),
        (["--max-file-bytes", "17g"], {}, "to --max-data-bytes (17179869184)"),
        (["--gpu-memory", "1.5"], {}, "--gpu-memory 1.5: it must be above 0"),
        (
            ["--memory-fraction", "0.5"],
            {},
            "--memory-fraction (WAVEFILL_MEMORY_FRACTION): its name is",
        ),
        ([], {"WAVEFILL_MEMORY_FRACTION": "0.5"}, "its name is --gpu-memory now"),
        (["--max-queue", "0"], {}, "--max-queue 0: every request would be rejected"),
        (["--stall-seconds", "0"], {}, "--stall-seconds 0: a step may take longer"),
        (["--max-body-bytes", "1"], {}, "--max-body-bytes 1: no request is so short"),
        (["--max-header-bytes", "1"], {}, "--max-header-bytes 1: ordinary clients send about"),
        (["--allowed-origins", '["*"]'], {}, '--allowed-origins ["*"]: an origin is like'),
        (["--allowed-hosts", "http://x"], {}, "--allowed-hosts http://x: a host is a name or"),
        (["--host", ""], {}, "--host: it is empty: give an address, 0.0.0.0 for all, or leave"),
        (["--api-key", ""], {}, "--api-key: it is empty: give a key, or leave"),
        (["--kv-dtype", "int8"], {}, "--kv-dtype int8: choose one of auto, fp8_e4m3"),
        (["--served-model-name", "a,b,a"], {}, "--served-model-name: 'a' is there twice"),
        (["--page-size", "24"], {}, "--page-size 24: choose one of 16, 32, 64, 128"),
        (["--snapshot-every", "1"], {}, "--snapshot-every 1: at least 64 tokens lie between two"),
        (
            ["--max-model-len", "1"],
            {},
            "--max-model-len 1: a prompt and its answer take 2 tokens: raise it",
        ),
        (["--max-num-seqs", "128k"], {}, "--max-num-seqs 131072: a step has at most 65535 of"),
        (["--seed", "-3"], {}, "--seed -3: a whole number from 0 up is needed"),
        (
            ["--chat-template", "nowhere.jinja"],
            {},
            "nowhere.jinja: no such file: give a file with a",
        ),
        (
            ["--api-key-file", "nowhere"],
            {},
            "--api-key-file nowhere: No such file or directory: give a text file",
        ),
        (
            ["--dashboard-keys", "eve"],
            {},
            "--dashboard-keys eve: no API key has this name, the server",
        ),
        (
            ["--dashboard-keys", "alice,eve", "--api-key", "alice sk-1"],
            {},
            "--dashboard-keys eve: no API key has this name, the server has alice",
        ),
        ([], {"WAVEFILL_API_KEY": " ,"}, "WAVEFILL_API_KEY: it has commas alone: give a key, or"),
        ([], {"WAVEFILL_DEVICE": "tpu"}, "WAVEFILL_DEVICE tpu: choose one of auto, cpu, cuda"),
        ([], {"WAVEFILL_PREFIX_CACHE": "maybe"}, "WAVEFILL_PREFIX_CACHE maybe: choose on or off"),
    ],
)
def test_a_wrong_value_is_named_with_its_source(
    words: list[str], environment: dict[str, str], expected: str
):
    with pytest.raises(UsageError) as caught:
        config(*words, **environment)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "serve --max-num-batched-tokens 2048 --pipeline_parallel_size=2 some/model",
            [
                "error: --max-num-batched-tokens: not an option of wavefill serve: "
                "use --max-batched-tokens",
                "       --pipeline_parallel_size: not an option of wavefill serve: leave it out, "
                "or use --tensor-parallel, which divides a model among GPUs",
            ],
        ),
        (
            "serve -c 4096 -ngl 99 -t 8 -hf some/model",
            [
                "error: -c: not an option of wavefill serve: use --max-model-len, or --kv-tokens "
                "for all requests together",
                "       -ngl: not an option of wavefill serve: leave it out, layers are all on the "
                "device",
                "       -t: not an option of wavefill serve: use --threads",
                "       -hf: not an option of wavefill serve: write wavefill serve MODEL",
            ],
        ),
        (
            "plan --mem-fraction-static 0.8 --max-running-requests 4",
            [
                "error: --mem-fraction-static: not an option of wavefill plan: use --gpu-memory, "
                "a share of the memory that is free",
                "       --max-running-requests: not an option of wavefill plan: use --max-num-seqs",
            ],
        ),
        (
            "chat --context-length 5 --enforce",
            [
                "error: --context-length: not an option of wavefill chat: use --max-model-len",
                "       --enforce: not an option of wavefill chat: see `wavefill chat --help`",
            ],
        ),
        ("serve --max_model_len 5", ["error: --max_model_len: write --max-model-len"]),
        (
            "serve --max-model-length 5",
            [
                "error: --max-model-length: not an option of wavefill serve: "
                "did you mean --max-model-len?"
            ],
        ),
        # An abbreviation would mean something else once there is another option like it.
        (
            "serve --gpu-mem 1",
            ["error: --gpu-mem: not an option of wavefill serve: did you mean --gpu-memory?"],
        ),
        (
            "plan --frobnicate",
            ["error: --frobnicate: not an option of wavefill plan: see `wavefill plan --help`"],
        ),
        (
            "bench serve --num-prompt 3",
            ["error: --num-prompt: not an option of wavefill bench: did you mean --num-prompts?"],
        ),
        (
            "serve a b",
            ["error: b: one argument too many (lists have commas): see `wavefill serve --help`"],
        ),
        (
            "serve --log-requests=1",
            ["error: --log-requests/--no-log-requests takes no value: see `wavefill serve --help`"],
        ),
        ("servee", ["error: wavefill servee: no such command: did you mean `wavefill serve`?"]),
        ("run some/model", ["error: wavefill run: no such command: did you mean `wavefill chat`?"]),
        ("launch x", ["error: wavefill launch: no such command: did you mean `wavefill serve`?"]),
        ("frobnicate", ["error: wavefill frobnicate: no such command: see `wavefill --help`"]),
        (
            "serve --api-key",
            ["error: --api-key: expected one argument: see `wavefill serve --help`"],
        ),
    ],
)
def test_a_wrong_option_is_an_error_of_one_line_with_what_to_write_instead(
    words: str, expected: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == expected


def test_the_remedies_for_options_of_others_name_options_that_there_are():
    parser = Parser()
    serve.add_arguments(parser)
    known = set(parser.options())
    assert not {f"--{name}" for name in REMEDIES} & known
    named = {word for text in REMEDIES.values() for word in re.findall(r"--[a-z-]+", text)}
    assert named <= known


def test_the_service_links_of_kubernetes_are_not_taken_for_options():
    links = {
        "WAVEFILL_PORT": "tcp://10.0.0.1:8000",
        "WAVEFILL_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WAVEFILL_SERVICE_HOST": "10.0.0.1",
    }
    assert config(**links).port == 8000
    assert unknown_variables(links) == {}


def test_a_misspelt_variable_is_named_with_what_to_set_instead():
    names = (
        "MAX_MODELLEN",
        "MAX_MODEL_LEN",
        "API_KEY",
        "GPU_MEMORY_UTILIZATION",
        "MODEL_PATH",
        "FROBNICATE",
    )
    assert unknown_variables({f"WAVEFILL_{name}": "1" for name in names}) == {
        "WAVEFILL_MAX_MODELLEN": "did you mean WAVEFILL_MAX_MODEL_LEN?",
        "WAVEFILL_GPU_MEMORY_UTILIZATION": "use --gpu-memory, a share of the memory that is free",
        "WAVEFILL_MODEL_PATH": "write wavefill serve MODEL",
        "WAVEFILL_FROBNICATE": "see `wavefill serve --help`",
    }


def test_a_variable_that_is_empty_sets_nothing():
    names = (*SERVER_FLAGS, *ENGINE_FLAGS, "api_key", "model", "revision", "config")
    assert config(**{f"WAVEFILL_{name.upper()}": "" for name in names}) == config()
