"""`wavefill formats`: what it says of stored and running weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from server.cli.commands.formats import capability_of
from server.cli.main import UsageError, main
from tests.support.cli.reports import wavefill_here
from tests.support.quantization.gpt_oss_model import write_gpt_oss
from tests.support.quantization.quantized_models import write_quantized

# The models of these tests are float32, as a GPU would run them.
HOPPER = ("--capability", "9.0", "--dtype", "bfloat16")


def formats(*words: str | Path) -> tuple[int, str, str]:
    """-> exit code, stdout, stderr"""
    done = wavefill_here("formats", *words)
    return done.returncode, done.stdout, done.stderr


def formats_in_a_process(
    capfd: pytest.CaptureFixture[str], *words: str | Path
) -> tuple[int, str, str]:
    """As users get it: the report is computed by a process of its own."""
    with pytest.raises(SystemExit) as done:
        main(["formats", *map(str, words)])
    captured = capfd.readouterr()
    code = done.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


def row_of(text: str, layer: str) -> list[str]:
    """The cells of a layer's row."""
    [line] = [line for line in text.splitlines() if line.startswith(layer)]
    return re.split(r" {2,}", line)


def test_stored_and_running_forms_are_compared_on_a_gpu_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    write_quantized(tmp_path, "gptq-act-order")
    code, out, err = formats_in_a_process(capfd, tmp_path, *HOPPER)
    assert (code, err) == (0, "")
    row = row_of(out, "model.layers.*.self_attn.q_proj")
    assert row[1:3] == ["2", "gptq, 4 bits, group 128"]
    assert row[4] == "int4 in groups of 128, act-order"
    # One rounding to bfloat16: between a quarter and all of 2^-8.
    assert 0.1 < float(row[6].removesuffix("%")) < 0.4
    head = row_of(out, "lm_head")
    assert head[2] == "float32" and head[4] == "bfloat16"


def test_fp8_codes_with_scales_of_rows_run_as_they_are(tmp_path: Path):
    write_quantized(tmp_path, "fp8-tensor")
    _, out, _ = formats(tmp_path, *HOPPER)
    row = row_of(out, "model.layers.*.mlp.down_proj")
    assert row[2] == "fp8, 8 bits, one scale a tensor" and row[4] == "fp8 in rows"
    assert row[6] == "0.00%"


def test_fp8_codes_with_scales_of_blocks_are_rounded_in_some_products(tmp_path: Path):
    write_quantized(tmp_path, "fp8-block")
    _, out, _ = formats(tmp_path, *HOPPER)
    row = row_of(out, "model.layers.*.mlp.down_proj")
    assert row[2] == "fp8, 8 bits, block 128 x 128" and row[4] == "fp8 in blocks of 128 x 128"
    assert row[3] == row[5] and 0.1 < float(row[6].removesuffix("%")) < 0.4


def test_a_model_in_float32_runs_in_it_on_a_gpu_that_is_not_there(tmp_path: Path):
    """As it does on one that is, where its codes are dequantized."""
    write_quantized(tmp_path, "fp8-tensor")
    _, out, _ = formats(tmp_path, "--capability", "9.0")
    row = row_of(out, "model.layers.*.mlp.down_proj")
    assert row[4] == "float32, dequantized when loaded"


def test_quantizing_while_loading_has_an_error():
    _, out, _ = formats("--quantization", "fp8", "--capability", "9.0")
    row = row_of(out, "model.layers.*.self_attn.q_proj")
    assert row[2] == "bfloat16" and row[4] == "fp8 in rows"
    # e4m3 has 3 bits of mantissa: a uniform error of at most 2^-4 of a number has this size.
    assert 2 < float(row[6].removesuffix("%")) < 3.5


def test_a_cpu_and_a_gpu_without_bfloat16_dequantize_when_loading(tmp_path: Path):
    write_quantized(tmp_path, "awq")
    for words in (("--device", "cpu"), ("--capability", "7.5")):
        _, out, _ = formats(tmp_path, *words)
        row = row_of(out, "model.layers.*.self_attn.q_proj")
        assert row[4].endswith("dequantized when loaded"), words


def test_fp8_needs_a_gpu(capfd: pytest.CaptureFixture[str]):
    code, out, err = formats_in_a_process(capfd, "--quantization", "fp8", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "--quantization fp8: a GPU of compute capability 8.0 or later is needed" in err


def test_config_json_alone_is_enough_but_for_the_error(tmp_path: Path):
    write_quantized(tmp_path, "int4-g128")
    (tmp_path / "model.safetensors").unlink()
    code, out, _ = formats(tmp_path, "--capability", "8.0")
    assert code == 0 and "no weights are in this directory" in out
    row = row_of(out, "model.layers.*.self_attn.q_proj")
    assert "pack-quantized, 4 bits, group 128" in row and "%" not in out


def test_a_method_without_a_reader_is_refused(tmp_path: Path):
    write_quantized(tmp_path, "awq")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    code, out, err = formats(tmp_path)
    assert code == 2 and out == ""
    assert "bitsandbytes" in err and "supported are fp8" in err


def test_a_capability_is_two_numbers():
    assert capability_of("8.9") == (8, 9) and capability_of("12.0") == (12, 0)
    for text in ("9", "h100", "9.0a", "-1.0"):
        with pytest.raises(UsageError, match="two numbers"):
            capability_of(text)


def test_experts_in_tensors_of_all_are_counted_once(tmp_path: Path):
    """4 experts of 2 layers, 320 x 96 each: 17 bytes for 32 codes."""
    write_gpt_oss(tmp_path)
    code, out, err = formats(tmp_path, *HOPPER)
    assert code == 0, err
    row = row_of(out, "model.layers.*.mlp.experts.gate_up_proj")
    assert row[1:5] == ["8", "mxfp4, 4 bits, group 32", "127.5 KiB", "fp4 in groups of 32"]
    assert row[6] == "0.00%"
