"""`wavefill plan`: what it says to a person, and that it needs neither a GPU nor weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import FAMILIES, SHAPES
from model_zoo.layers.linear import cpu_reorders
from server.cli.commands import formats
from server.cli.commands import plan as plan_command
from server.cli.commands.plan import card_bytes
from server.cli.main import UsageError, main
from server.cli.model_source import built_in_directory
from tests.support.cli.pseudo_terminal import pseudo_terminal
from tests.support.cli.reports import wavefill_here

COMMAND = Path(sys.executable).parent / "wavefill"
GIB = 2**30


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No file but config.json."""
    directory = tmp_path_factory.mktemp("qwen3-8b")
    (directory / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    return directory


def plan(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return wavefill_here("plan", *words, **environment)


def plan_in_processes(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As users run it: slower than plan(), with whatever that leaves out."""
    return subprocess.run(
        [COMMAND, "plan", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_a_card_that_is_not_there_is_planned_for_by_config_json_alone(shape: Path) -> None:
    done = plan_in_processes(shape, "--card", "80GiB", "--max-model-len", "32k")
    assert done.returncode == 0, done.stderr
    assert "8.19 billion parameters" in done.stdout
    assert re.search(r"weights +15\.26 GiB +bfloat16; 30\.51 GiB in float32; exact", done.stdout)
    assert "144.0 KiB a token in bfloat16" in done.stdout
    assert done.stdout.count("estimated") == 4 and "serve` measures what" in done.stdout
    tokens, most = re.findall(r"KV holds ([\d,]+) tokens.*?([\d.]+) of 32,768", done.stdout)[0]
    assert float(tokens.replace(",", "")) / 32768 == pytest.approx(float(most), abs=0.06)
    [halved] = re.findall(r"with --kv-dtype fp8_e4m3: ([\d,]+) tokens", done.stdout)
    assert int(halved.replace(",", "")) >= 2 * int(tokens.replace(",", ""))


def test_recurrent_states_and_kv_share_the_memory(tmp_path: Path) -> None:
    """Of Qwen3.5-27B: 48 of 64 layers have states, of 147.75 MiB together, or half in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Qwen3.5-27B"]))
    found: dict[str, tuple[int, float, float]] = {}
    for dtype in ("float32", "bfloat16"):
        done = plan(tmp_path, "--card", "80GiB", "--state-dtype", dtype)
        assert done.returncode == 0, done.stderr
        assert "64 layers, 48 of them gated delta nets" in done.stdout
        assert "64.0 KiB a token in bfloat16" in done.stdout
        [states] = re.findall(r"states +([\d.]+) GiB +(\d+) recurrent states of", done.stdout)
        [kv] = re.findall(r"KV +([\d.]+) GiB", done.stdout)
        found[dtype] = int(states[1]), float(states[0]), float(kv)
        assert f"{states[1]} running" in done.stdout
    count, taken, kv = found["float32"]
    assert taken == pytest.approx(count * 147.75 / 1024, abs=0.02)
    assert taken / (taken + kv) == pytest.approx(0.4, abs=0.01)
    assert found["bfloat16"][0] == pytest.approx(2 * count, rel=0.05)


def test_layers_with_a_window_hold_the_kv_of_their_window_alone(tmp_path: Path) -> None:
    """62 layers, of which every sixth sees all positions and the others 1024."""
    windows = {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "layer_types": [
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(62)
        ],
    }
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"] | windows))
    done = plan(tmp_path, "--card", "141GiB", "--max-model-len", "32k")
    assert done.returncode == 0, done.stderr
    assert "62 layers, 52 with a window of 1,024" in done.stdout
    assert "496.0 KiB a token in bfloat16, 416.0 KiB of it only within a window" in done.stdout
    [kv] = re.findall(r"KV +([\d.]+) GiB", done.stdout)
    [requests] = re.findall(r"KV holds .* ([\d.]+) of 32,768", done.stdout)
    each = float(kv) * GIB / float(requests)
    assert 16 * each <= 52e9
    assert each <= 62 * 2 * 16 * 128 * 2 * 32768 / 5


def test_experts_in_mxfp4_and_windows_are_counted_as_config_json_says(tmp_path: Path) -> None:
    """gpt-oss-20b: 24 layers of 32 experts, 2880 x 8640 each; 17 bytes for 32 codes."""
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    shape = FAMILIES["gpt-oss-20b"] | {"quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    done = plan(tmp_path, "--card", "24GiB")
    assert done.returncode == 0, done.stderr
    assert "20.91 billion parameters, 3.61 billion active" in done.stdout
    assert "24 layers, 12 with a window of 128" in done.stdout
    [stored, plain] = re.findall(r"weights +([\d.]+) GiB +quantized; ([\d.]+) GiB", done.stdout)[0]
    columns = 2944  # padded to whole blocks
    saved = 24 * 32 * 8640 * (2 * 2880 - columns / 2 - 2880 / 32)
    assert float(plain) - float(stored) == pytest.approx(saved / GIB, abs=0.02)
    assert "48.0 KiB a token in bfloat16, 24.0 KiB of it only within a window" in done.stdout


def test_changes_are_named_only_where_they_hold_more_and_go_with_the_other_limits(
    shape: Path,
) -> None:
    few = plan(shape, "--card", "80", "--max-batched-tokens", "32", "--max-num-seqs", "16")
    assert few.returncode == 0, few.stderr
    assert "16 running, 32 tokens a step" in few.stdout and "with --max-num-seqs" not in few.stdout
    many = plan(shape, "--card", "24", "--max-num-seqs", "1000", "--max-model-len", "1000")
    assert "1000 running" in many.stdout and "with --max-num-seqs 64" in many.stdout


def test_what_does_not_fit_ends_with_code_2_and_numbers_to_change(shape: Path) -> None:
    done = plan_in_processes(shape, "--card", "20", WAVEFILL_MAX_MODEL_LEN="40960")
    assert done.returncode == 2
    assert "weights" in done.stdout and "KV holds" not in done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith("error: memory: KV for one request of --max-model-len 40960 takes 5.62")
    assert re.search(r"makes it fit: --max-model-len \d+", line)


def test_more_sequences_than_a_plan_of_attention_holds_are_refused_unless_nothing_is_planned(
    shape: Path,
) -> None:
    arguments = shape, "--card", "80", "--max-num-seqs", "9000", "--max-batched-tokens", "9000"
    done = plan(*arguments)
    assert done.returncode == 2 and "KV holds" not in done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith("error: --max-num-seqs 9000: --attention flash2 plans at most 8192")
    assert "--attention flash1" in line
    assert (
        "9000 running" in plan(*arguments, "--attention", "flash1", "--max-model-len", "64").stdout
    )


def test_without_a_card_it_is_this_machine_that_is_planned_for() -> None:
    done = plan_in_processes(
        "tiny-chat", "--device", "cpu", "--kv-tokens", "4096", "--dtype", "bfloat16"
    )
    assert done.returncode == 0, done.stderr
    assert "this CPU" in done.stdout and "KV holds 4,096 tokens" in done.stdout
    assert "estimated" not in done.stdout
    assert ("copies" in done.stdout) == cpu_reorders(torch.bfloat16), "of the head, which is tied"


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80g", 80 * GIB), ("24", 24 * GIB), ("1.5 GB", GIB * 3 // 2),
     ("1536MiB", GIB * 3 // 2), ("1t", 1024 * GIB)],
)  # fmt: skip
def test_a_card_may_be_written_in_the_usual_ways(text: str, size: int) -> None:
    assert card_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "large", "-3g", "80 gigabytes", "1e9"])
def test_other_words_for_a_card_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="24GiB or 80g"):
        card_bytes(text)


@pytest.mark.parametrize("text", ["1m", "1023m", "0.0000001g", "17t", "99999999999999t"])
def test_a_card_that_no_gpu_could_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="1GiB to 16TiB"):
        card_bytes(text)


def test_more_kv_than_fits_is_an_error_that_says_how_much_fits(shape: Path) -> None:
    done = plan(shape, "--card", "80", "--kv-tokens", "100000000000")
    assert done.returncode == 2
    most = int(re.findall(r"ask for at most (\d+)", done.stderr)[0])
    assert plan(shape, "--card", "80", "--kv-tokens", str(most)).returncode == 0


def test_the_kv_is_said_to_be_what_remains_what_is_of_use_or_what_was_asked_for(
    shape: Path,
) -> None:
    for words, why in (
        ([shape, "--card", "24GiB"], "all that remains"),
        (["tiny-chat", "--card", "24GiB"], "all that the requests can use"),
        ([shape, "--card", "24GiB", "--kv-tokens", "8192"], "as --kv-tokens says"),
    ):
        [line] = re.findall(r"^  KV .*", plan(*words).stdout, re.M)
        assert line.endswith(why), line


def test_numbers_of_engines_and_ranks_are_those_of_serve() -> None:
    done = plan("tiny-chat", WAVEFILL_DATA_PARALLEL="0")
    assert done.returncode == 2 and "--data-parallel 0: choose from 1 to 64" in done.stderr
    done = plan("tiny-chat", "--tensor-parallel", "17")
    assert done.returncode == 2 and "--tensor-parallel 17: choose from 1 to 16" in done.stderr


@pytest.mark.parametrize("command", ["plan", "formats"])
def test_the_report_sees_the_gpus_of_ranges(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.setattr(plan_command, "FIT_REPORT_COMMAND", shown)
    monkeypatch.setattr(formats, "FORMAT_REPORT_COMMAND", shown)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4-6,1")
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "tiny-chat"])
    assert capfd.readouterr().out == "4,5,6,1\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3-0")
    with pytest.raises(SystemExit, match=r"^2$"):
        main([command, "tiny-chat"])
    assert "CUDA_VISIBLE_DEVICES=3-0: the range 3-0 has no GPU" in capfd.readouterr().err


def test_a_card_and_a_cpu_together_are_refused() -> None:
    done = plan("--card", "8g", "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "") and "leave one of them out" in done.stderr


def test_the_headers_of_a_checkpoint_are_read_and_have_to_fit_config_json(tmp_path: Path) -> None:
    built_in = built_in_directory()
    for file in built_in.iterdir():
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, tmp_path)
    done = plan(tmp_path, "--card", "8")
    assert done.returncode == 0, done.stderr
    assert re.search(r"checkpoint +17.3 MiB +189 tensors of 1 file in bfloat16; exact", done.stdout)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 9
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = plan(tmp_path, "--card", "8")
    assert done.returncode == 2 and "KV holds" not in done.stdout
    assert "are not the weights" in done.stderr and "missing: model.layers.8" in done.stderr
    assert plan(tmp_path, "--card", "8", "--load-format", "dummy").returncode == 0


def test_a_download_that_is_not_complete_is_planned_for_by_config_json(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    shutil.copy(built_in_directory() / "config.json", snapshot)
    (snapshot / "model-1.safetensors").write_bytes(b"cut")
    done = plan_in_processes("org/model", "--card", "8", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"checkpoint +incomplete +.*download the file again", done.stdout)


def test_a_terminal_of_80_columns_gets_a_bar_of_the_memory(shape: Path) -> None:
    with pseudo_terminal((COMMAND, "plan", shape, "--card", "40"), NO_COLOR="1") as terminal:
        assert terminal.wait(60) == 0
    [bar] = [line for line in terminal.lines if line.startswith("  [")]
    assert len(bar) == 80
    assert re.fullmatch(r"  \[W{25,33}S+A+G+K{30,38}\.+\]", bar), bar
    assert "[W" not in plan(shape, "--card", "40").stdout
