"""What the operator reads: the start-up report, the status line of a busy server, the log."""

from __future__ import annotations

import json
import logging
import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from runtime.config import EngineConfig
from runtime.logs import JsonFormatter, TextFormatter
from runtime.messages import Progress, Ready
from runtime.stats import Stats
from server.config import ServerConfig
from server.process.report.start_report import Reporter, busy_line, start_report
from tests.support.server.fake_engine import ReportedClient, ready

FACTS = replace(ready(), weight_bytes=3 << 30, kv_bytes=512 << 20, max_model_len=512)


def report(**changes: object) -> str:
    return start_report(ServerConfig(**changes), FACTS)


def test_the_report_has_the_capacity():
    text = report()
    assert "weights 3.0 GiB | KV 512 MiB" in text
    assert "1,024 tokens (16 a page) = 2.0 requests of 512\n" in text
    whole = replace(FACTS, max_model_len=512 << 10, num_pages=1 << 17)
    text = start_report(ServerConfig(), whole)
    assert "= 4.0 requests of 524,288, 1,024.0 requests of 2,048" in text


def test_the_report_has_the_use_of_memory_and_time():
    loaded = replace(
        FACTS,
        memory=[
            ("weights", 15 << 30),
            ("activations", 2 << 30),
            ("KV", 50 << 30),
            ("unused", 512 << 20),
        ],
        phases=[("imports", 2.94), ("weights", 1.5)],
    )
    text = start_report(ServerConfig(), loaded)
    assert "memory  weights 15.0 GiB | activations 2.0 GiB | KV 50.0 GiB | unused 512 MiB\n" in text
    assert "start   imports 2.9 | weights 1.5 s\n" in text


def test_the_report_has_the_recurrent_states_and_what_is_not_read():
    hybrid = replace(FACTS, num_states=72, num_snapshots=1234, text_part=True)
    text = start_report(ServerConfig(), hybrid)
    assert "states  72: one a sequence, two with a grammar | 1,234 snapshots in host mem" in text
    assert "reads   text: the part of this model that sees images is not loaded\n" in text
    text = start_report(ServerConfig(), replace(hybrid, num_snapshots=0, text_part=False))
    assert "two with a grammar | no prefix cache\n" in text and "reads " not in text
    assert "states " not in report()
    text = start_report(ServerConfig(), replace(hybrid, delta_nets="prompts by Hopper kernels"))
    assert " for the prefix cache | prompts by Hopper kernels\n" in text


def test_the_report_says_why_so_many_devices_were_taken():
    text = start_report(ServerConfig(), replace(FACTS, why_ranks="2 devices with KV of 9 tokens"))
    assert "ranks   --tensor-parallel auto: 2 devices with KV of 9 tokens\n" in text
    assert "tensor-parallel" not in report()


def test_the_report_says_that_each_device_has_whole_experts():
    whole = ServerConfig(engine=EngineConfig(model="x", tensor_parallel=2, expert_parallel=True))
    assert "  ranks   whole experts on each\n" in start_report(whole, replace(FACTS, ranks=2))
    assert "whole experts" not in start_report(whole, FACTS)  # of `auto`, which has chosen 1
    assert "whole experts" not in start_report(ServerConfig(), replace(FACTS, ranks=2))


def test_the_report_says_how_devices_add_what_they_have_computed():
    said = "in the norms up to 512 tokens, by NCCL above"
    text = start_report(ServerConfig(), replace(FACTS, ranks=2, all_reduce=said))
    assert f"  ranks   sums {said}\n" in text
    assert "sums" not in report()


def test_the_report_has_the_limits():
    text = report()
    assert "512 tokens a request | 64 running, 1,024 with the queue | 512 tokens a step" in text


def test_a_length_that_only_kv_limits_is_reported_as_such():
    little = replace(FACTS, max_model_len=1024)
    assert "1,024 tokens a request (limited by KV) | " in start_report(ServerConfig(), little)
    server_config = ServerConfig(engine=EngineConfig(model="x", max_model_len=1024))
    assert "1,024 tokens a request | " in start_report(server_config, little)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
    ],
)
def test_the_report_names_an_address_that_a_caller_can_use(host: str, url: str):
    assert f"{url}/v1 " in report(host=host)


def test_the_command_of_the_report_can_be_pasted():
    text = report(served_names=("tiny-chat", "alias"))
    words = shlex.split(text[text.index("curl ") :])
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == "tiny-chat"


def test_a_model_of_images_without_an_image_processor_is_reported_with_the_remedy():
    seeing = replace(FACTS, reads_images=True)
    assert "reads " not in start_report(ServerConfig(), seeing)
    text = start_report(ServerConfig(), seeing, processes=False)
    assert "  reads   text: preprocessor_config.json" in text and "--max-image-pixels 0" in text
    assert "reads " not in start_report(ServerConfig(), FACTS, processes=False)


def test_the_request_to_try_is_a_completion_where_the_model_takes_no_messages():
    text = start_report(ServerConfig(api_keys=("k",)), FACTS, chats=False)
    words = shlex.split(text[text.index("curl ") :])
    assert (
        words[1] == "http://127.0.0.1:8000/v1/completions" and "authorization: Bearer KEY" in words
    )
    assert json.loads(words[words.index("-d") + 1]) == {"model": "tiny-chat", "prompt": "Hello"}


def test_the_report_says_that_a_key_is_needed_and_not_which():
    text = report(api_keys=("a-secret",))
    assert "Bearer KEY" in text and "a-secret" not in text


def test_the_busy_line_counts_what_happened_since_the_last_one():
    before = Stats(prompt_tokens=100, cached_tokens=10, generated_tokens=50)
    now = Stats(
        running=3,
        waiting=4,
        pages_used=16,
        pages_total=64,
        prompt_tokens=300,
        cached_tokens=60,
        generated_tokens=250,
    )
    assert busy_line(now, before, 10.0) == (
        "running 3 | waiting 4 | KV 25 % | prompt 20 tok/s (25 % cached) | generated 20 tok/s"
    )


def test_a_log_line_is_json_whatever_the_message_holds():
    record = logging.LogRecord("w", logging.ERROR, "file", 1, 'a "quote"\n%s', ("é",), None)
    assert json.loads(JsonFormatter().format(record)) | {"time": ""} == {
        "time": "",
        "level": "error",
        "logger": "w",
        "message": 'a "quote"\né',
    }


def record_with(**fields: object) -> logging.LogRecord:
    record = logging.LogRecord("w", logging.INFO, "file", 1, "request", (), None)
    record.fields = fields
    record.created = 1795413096.25
    return record


def test_a_line_of_text_has_a_date_and_the_fields_that_are_known():
    record = record_with(status=200, model='a "b" c', error=None, client_gone=False)
    date, _, rest = TextFormatter().format(record).partition(" ")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", date)
    assert rest.endswith(r'INFO w: request status=200 model="a \"b\" c" client_gone=false')


def test_a_line_of_json_has_the_fields_as_members_and_milliseconds():
    line = json.loads(JsonFormatter().format(record_with(status=200, error=None)))
    assert (line["status"], line["error"]) == (200, None)
    assert line["time"] == "2026-11-23T05:51:36.250Z"


def test_a_field_cannot_begin_a_line_of_its_own():
    record = record_with(path="x\n2026-01-01 00:00:00 ERROR forged")
    assert "\n" not in TextFormatter().format(record)
    assert "\n" not in JsonFormatter().format(record)


def end_after_two_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reporter that looks for the third time ends with EOFError."""
    moments = iter([None, None])

    async def next_moment(seconds: float) -> None:
        if next(moments, EOFError) is EOFError:
            raise EOFError

    monkeypatch.setattr(
        "server.process.report.start_report.asyncio", SimpleNamespace(sleep=next_moment)
    )


@pytest.mark.parametrize(
    ("options", "printed", "logged"),
    [({}, 1, 0), ({"log_format": "json"}, 0, 1), ({"log_level": "warning"}, 0, 0)],
)
async def test_the_report_is_text_an_event_of_a_json_log_or_below_the_level(
    options: dict[str, Any],
    printed: int,
    logged: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    end_after_two_moments(monkeypatch)
    client = ReportedClient(FACTS)
    with caplog.at_level("INFO"), pytest.raises(EOFError):
        await Reporter(ServerConfig(**options), client).run()  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("tokens a request") == printed
    assert [record.getMessage()[:8] for record in caplog.records] == ["wavefill"] * logged


@pytest.mark.parametrize(
    ("facts", "processes", "why"),
    [
        (FACTS, False, "is no model that reads images"),
        (replace(FACTS, text_part=True), False, "images are switched off"),
        (replace(FACTS, reads_images=True), True, ""),
        (replace(FACTS, reads_images=True), False, "add preprocessor_config.json"),
    ],
)
async def test_options_of_images_given_for_a_model_of_text_are_warned_of(
    facts: Ready,
    processes: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    end_after_two_moments(monkeypatch)
    config = ServerConfig(image_urls="any", limit_mm_per_prompt="image=3", log_level="error")
    with caplog.at_level("WARNING"), pytest.raises(EOFError):
        reporter = Reporter(config, ReportedClient(facts), processes=processes)  # type: ignore[arg-type]
        await reporter.run()
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == bool(why)
    said = "--image-urls and --limit-mm-per-prompt: without effect, since "
    assert all(message.startswith(said) and why in message for message in found)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_option_of_sums_is_warned_of_where_one_device_has_the_model(
    ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    end_after_two_moments(monkeypatch)
    engine = EngineConfig(model="m", disable_custom_all_reduce=True)
    client = ReportedClient(replace(FACTS, ranks=ranks))
    with caplog.at_level("WARNING"), pytest.raises(EOFError):
        await Reporter(ServerConfig(log_level="error", engine=engine), client).run()  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records]
    warned = any(text.startswith("--disable-custom-all-reduce: without effect") for text in said)
    assert warned == (ranks == 1)


@pytest.mark.parametrize("num_states", [0, 8])
@pytest.mark.parametrize("directory", ["", "data"])
async def test_options_of_states_and_files_that_change_nothing_are_warned_of(
    num_states: int,
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    end_after_two_moments(monkeypatch)
    engine = EngineConfig(model="m", snapshot_every=128, state_dtype="bfloat16")
    config = ServerConfig(batch_concurrency=4, data_dir=directory, log_level="error", engine=engine)
    client = ReportedClient(replace(FACTS, num_states=num_states))
    with caplog.at_level("WARNING"), pytest.raises(EOFError):
        await Reporter(config, client).run()  # type: ignore[arg-type]
    found = "\n".join(record.getMessage() for record in caplog.records)
    assert ("--batch-concurrency: without effect, since files" in found) == (not directory)
    assert ("--snapshot-every and --state-dtype: without effect" in found) == (not num_states)


async def test_loading_is_reported_in_tenths_and_a_restart_has_a_report_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    client = ReportedClient()
    seen = iter(
        [
            *(Progress("weights", done, 200) for done in (0, 1, 40, 41, 150, 200)),
            replace(FACTS, load_seconds=7.04),
            *(Progress("weights", done, 200) for done in (0, 100)),
            replace(FACTS, load_seconds=2.0),
        ]
    )

    async def next_moment(seconds: float) -> None:
        now = next(seen, None)
        if now is None:
            raise EOFError
        ready = isinstance(now, Ready)
        client.ready, client.progress = (now, None) if ready else (None, now)

    monkeypatch.setattr(
        "server.process.report.start_report.asyncio", SimpleNamespace(sleep=next_moment)
    )
    with caplog.at_level("INFO"), pytest.raises(EOFError):
        await Reporter(ServerConfig(), client).run()  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    loaded = [record.getMessage() for record in caplog.records]
    first = ["loading weights", "loading weights: 20 %", "loading weights: 70 %"]
    assert loaded == [*first, "loading weights", "loading weights: 50 %"]
    assert [line.split()[1] for line in lines if line.startswith("  ready")] == ["7.0", "2.0"]
