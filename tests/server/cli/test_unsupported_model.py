"""A model that is not supported: every command that reads it says which one is nearest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli.reports import wavefill_here
from tests.support.server.server_process import free_port

COMMAND = Path(sys.executable).parent / "wavefill"
CONFIG = {
    "model_type": "granite",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "residual_multiplier": 0.22,
}


@pytest.mark.parametrize(
    "words",
    [("plan",), ("formats",), ("serve", "--device", "cpu", "--port", str(free_port()))],
    ids=["plan", "formats", "serve"],
)
def test_a_command_ends_with_code_2_and_the_nearest_model_type(
    tmp_path: Path, words: tuple[str, ...]
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))  # and no tokenizer
    if words[0] == "serve":
        command = [COMMAND, *words, tmp_path]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    else:
        ran = wavefill_here(*words, tmp_path)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    _, _, message = ran.stderr.partition("error: ")
    lines = message.splitlines()
    assert lines[0].startswith(f'{tmp_path}/config.json: `model_type` is "granite": supported: ')
    assert lines[1:4] == [
        "  nearest: llama",
        "  config.json differs in scale factors (`residual_multiplier` 0.22)",
        "  tensors: not compared, because no safetensors file can be read",
    ]
    assert lines[4].startswith("  remedy: ")
