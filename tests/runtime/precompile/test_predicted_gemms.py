"""The GEMMs that a start times are compiled before PyTorch is there, as they are launched later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import SHAPES
from benchmarks.shapes.published import shape
from benchmarks.shapes.quantization import FORMATS
from model_zoo.config import read_config
from model_zoo.layers.linear import Linear
from model_zoo.registry import build
from runtime.precompile.predict_gemms import processes, usual_layers
from tests.support.kernels.uninterpreted import run_uninterpreted
from tests.support.paths import ROOT

pytest.importorskip("triton", reason="kernels are compiled by Triton, which is not here")

LAYER = "model.layers.0.mlp.up_proj", 6144, 4096, "silu"
BIASED = "model.layers.0.self_attn.q_proj", 6144, 4096, None, True
PROGRAM = """
import json
import sys
from functools import partial

from runtime.precompile.pool import Compilers
from runtime.precompile.predict import PredictedKernels
from runtime.precompile.predict_gemms import GEMM_KERNELS, Layer, compile_gemms

folder, (the_format, quantization, layers) = sys.argv[1], json.loads(sys.argv[2])
layers = tuple(Layer(*layer) for layer in layers)
process = Compilers()
call = partial(compile_gemms, folder, quantization, "bfloat16", layers)
process.begin(PredictedKernels(call, tuple(GEMM_KERNELS)))

from tests.support.kernels.compile_for_hopper import CompileOnly
from tests.support.kernels.shipped_quantized import *
from attention.common import dependent_launch
from model_zoo.layers.gemm.candidates import gemm_candidates
from runtime.precompile.compiling import compiling_only
from triton import knobs
from triton.runtime.driver import driver

dependent_launch.can_depend = lambda device: True
for answered in list(process._pending.values()):
    assert answered.wait(300)
found = []
knobs.compilation.listener = lambda src, cache_hit, **rest: found.append((src.name, cache_hit))
driver.set_active(CompileOnly())
_, outputs, inputs, gate, _ = layers[0]
with compiling_only(threads=2):
    for rows in (1, 16, 64):
        x, packed = tensor(rows, inputs), tensor(outputs, inputs)
        gemms = gemm_candidates(132, (9, 0), rows, outputs, inputs)[1:]
        if the_format:
            packed = weight(the_format)
            gemms = skinny_candidates(132, rows, outputs, inputs, BITS[packed.kind])
        for gemm in gemms:
            for activation in (None, gate):
                if activation is None or gemm.gates(rows, packed):
                    gemm.multiply(x, packed, None, activation)
        if the_format == "fp8 row":
            for gemm in skinny_fp8_candidates("row", 132, rows, outputs, inputs):
                call_fp8_product(gemm, rows, gate, bias=False)
    if len(layers) > 1:
        gemm = gemm_candidates(132, (9, 0), 8, outputs, inputs)[1]
        gemm.multiply(tensor(8, inputs), packed, tensor(outputs), None)
    if the_format == "int4 g128":
        PackedManyRowsGemm(128).run(tensor(300, inputs), packed, None)
    if the_format == "fp8 row":
        call_fp8_product(Fp8ManyRowsGemm(), 300, None)
process.close()
print(json.dumps(found))
"""


def test_the_kernels_have_the_names_that_requests_wait_for():
    program = (
        "from runtime.precompile.predict_gemms import GEMM_KERNELS\n"
        "from runtime.precompile.worker import kernel\n"
        "print(all(kernel(module, name).__name__ == name for name, module in GEMM_KERNELS.items()))"
    )
    assert run_uninterpreted(program) == "True\n"


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-4b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_layers_are_those_of_the_model(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(shape(name)))
    config = read_config(tmp_path)
    model = build(config, torch.bfloat16, torch.device("meta"))
    found = {
        (layer.outputs, layer.inputs, getattr(layer, "gate", None), layer.bias is not None)
        for layer in model.modules()
        if isinstance(layer, Linear) and not layer.is_replicated
    }
    layers = usual_layers(config)
    assert len(layers) == (5 if config.moe is None else 3)
    assert {layer[1:] for layer in layers} <= found


def test_few_cores_have_no_time_for_predictions(monkeypatch: pytest.MonkeyPatch):
    for cores, expected in ((2, 0), (7, 0), (8, 4), (16, 12), (224, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: range(cores))
        assert processes() == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stored", "quantization", "name"),
    [(None, "auto", ""), (None, "fp8", "fp8 row"), ("int4", "auto", "int4 g128")],
)
def test_gemms_are_compiled_when_the_engine_looks_for_them(
    stored: str | None, quantization: str, name: str, tmp_path: Path
):
    """In 16 bits, also with a bias; quantized while they are loaded; in int4."""
    config = SHAPES["qwen3-8b"]
    if stored is not None:
        config = config | {"quantization_config": FORMATS[stored]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("TRITON_INTERPRET", None)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    layers = [LAYER] if name else [LAYER, BIASED]
    arguments = json.dumps([name, quantization, layers])
    command = [sys.executable, str(program), str(tmp_path), arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 8
    assert all(was_there for _, was_there in found), found
