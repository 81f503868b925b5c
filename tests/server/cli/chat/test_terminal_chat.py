"""`wavefill chat` against a server: what it says, remembers and forgets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server.fake_engine import GREETING, FakeServer, fake_server
from tests.support.server.server_process import free_port


def chat(url: str, *lines: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "wavefill", "chat", "--base-url", url, *words],
        input="".join(f"{line}\n" for line in lines),
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )


def prompts(fake: FakeServer) -> list[str]:
    """What the engine was asked, with the marks of the template."""
    decode = fake.tokenizer.decode
    return [decode(request.tokens, skip_special=False) for request in fake.engine.requests]


def test_the_answer_is_printed_and_the_next_turn_remembers_it(fake: FakeServer):
    done = chat(fake.url, "Hello", "and now?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(GREETING) == 2
    first, second = prompts(fake)
    assert first == "<|user|>Hello<|end|><|assistant|>"
    assert second.startswith(f"<|user|>Hello<|end|><|assistant|>{GREETING}<|end|><|user|>and now?")


def test_reset_forgets_and_system_stays(fake: FakeServer):
    chat(fake.url, "one", "/system Be brief.", "two", "/reset", "three", "/exit", "four")
    system = "<|system|>Be brief.<|end|>"
    assert prompts(fake) == [
        "<|user|>one<|end|><|assistant|>",
        f"{system}<|user|>two<|end|><|assistant|>",
        f"{system}<|user|>three<|end|><|assistant|>",
    ]


def test_an_unknown_command_is_reported_and_not_sent(fake: FakeServer):
    done = chat(fake.url, "/copy this")
    assert "/copy is not a command here" in done.stdout and "/save FILE" in done.stdout
    assert fake.engine.requests == []


def test_the_address_may_have_the_version_and_the_option_a_short_name(fake: FakeServer):
    done = chat("http://127.0.0.1:1", "Hello", words=("--url", f"{fake.url}/v1"))
    assert GREETING in done.stdout, done.stderr


def test_what_stands_between_triple_quotes_and_after_a_backslash_is_one_message(fake: FakeServer):
    chat(fake.url, '"""one', '/two"""', "three\\", "four")
    assert prompts(fake)[0] == "<|user|>one\n/two<|end|><|assistant|>"
    assert prompts(fake)[1].endswith("<|user|>three\nfour<|end|><|assistant|>")


def test_stats_count_the_last_answer_and_all(fake: FakeServer):
    done = chat(fake.url, "/stats", "Hello", "Hello", "/stats")
    assert done.stdout.index("no answer yet") < done.stdout.index(GREETING)
    [output] = re.findall(r"last +\d+ prompt tokens .*, (\d+) output\n.*ended by stop", done.stdout)
    [both] = re.findall(r"all .* (\d+) output, 2 answers", done.stdout)
    assert int(both) == 2 * int(output) > 0


def test_a_conversation_is_saved_as_messages_or_as_text_and_never_over_a_file(
    fake: FakeServer, tmp_path: Path
):
    saved, text = tmp_path / "a.json", tmp_path / "a.md"
    done = chat(
        fake.url, "/system Be brief.", "Hello", f"/save {saved}", f"/save {text}", f"/save {saved}"
    )
    assert json.loads(saved.read_text("utf-8"))["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": GREETING},
    ]
    assert text.read_text("utf-8").endswith(f"## assistant\n\n{GREETING}\n")
    assert f"{saved} exists: give another name" in done.stderr


def test_an_image_is_refused_before_a_question_and_the_conversation_goes_on(
    fake: FakeServer, tmp_path: Path
):
    image, other = tmp_path / "a.png", tmp_path / "b.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(8))
    other.write_bytes(b"text")
    done = chat(fake.url, f"/image {image}", f"/image {other}", "/image gone.png", "Hello")
    assert "fake does not take this image" in done.stderr and "reads text only" in done.stderr
    assert f"{other} is no image that is known here" in done.stderr
    assert "gone.png: No such file or directory" in done.stderr
    assert prompts(fake) == ["<|user|>Hello<|end|><|assistant|>"]


def test_options_are_fields_of_every_request(fake: FakeServer):
    chat(fake.url, "one", "two", words=("--temperature", "0.5", "--max-tokens", "3"))
    params = [request.params for request in fake.engine.requests]
    assert [(p.temperature, p.max_tokens) for p in params] == [(0.5, 3)] * 2


@pytest.mark.parametrize("value", ["2.1", "nan", "-1"])
def test_a_temperature_that_no_server_takes_is_refused_before_one_is_asked(value: str):
    done = chat("http://127.0.0.1:1", words=("--temperature", value))
    assert done.returncode == 2
    assert done.stderr == f"error: --temperature {value}: choose from 0 to 2\n"


def test_a_failed_turn_is_reported_and_dropped_from_the_history(fake: FakeServer):
    fake.engine.fail_after = 0
    done = chat(fake.url, "one", "two")
    assert done.stderr.count("a seeded fault") == 2
    assert done.returncode == 1  # the input is no terminal
    assert prompts(fake)[1] == "<|user|>two<|end|><|assistant|>"


def test_a_key_that_is_missing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WAVEFILL_API_KEY", raising=False)
    with fake_server(tmp_path, api_keys=("k",)) as server:
        done = chat(server.url, "Hello")
        assert done.returncode == 1
        assert done.stderr.startswith("error: You did not provide an API key")
        assert done.stderr.endswith(": set WAVEFILL_API_KEY\n")
        monkeypatch.setenv("WAVEFILL_API_KEY", "k")
        assert GREETING in chat(server.url, "Hello").stdout


def test_a_server_that_is_not_there_is_one_line_and_code_1():
    done = chat(f"http://127.0.0.1:{free_port()}", "Hello")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: 127.0.0.1:")
    assert line.endswith(": Connection refused: start the server, or give the right --base-url")


def test_a_model_to_start_and_a_server_that_runs_are_not_both_taken():
    done = chat("http://127.0.0.1:1", words=("tiny-chat",))
    assert done.returncode == 2 and "use --model NAME" in done.stderr


def test_a_model_that_is_not_served_is_reported_before_a_question_is_typed(fake: FakeServer):
    done = chat(fake.url, "Hello", words=("--model", "other"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --model other: the server has fake, alias\n"
    assert fake.engine.requests == []
