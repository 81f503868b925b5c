"""Which GEMMs of quantized weights are timed, and what is kept of the choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model_zoo.layers.gemm import autotune, bands
from model_zoo.layers.gemm.autotune import (
    GemmKey,
    autotune_gemms,
    layers_by_key,
    leaving_scales,
    run_candidates,
    use,
)
from model_zoo.layers.gemm.autotune_cache import read_choices, write_choices
from model_zoo.layers.gemm.implementations import BUCKETS, MANY_BUCKETS
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm import candidates
from model_zoo.layers.quantized_gemm.candidates import (
    FP8_BUCKETS,
    PACKED_BUCKETS,
    quantized_candidates,
    untimed,
    use_quantized_gemms,
)
from model_zoo.layers.quantized_gemm.dequant_gemm import DequantizeInRegistersUnsplit
from model_zoo.layers.quantized_gemm.fp8.many_rows import Fp8ManyRowsGemm
from model_zoo.layers.quantized_gemm.fp8_gemm import (
    DequantizeThenCublas,
    ScaledMM,
    UnscaledMM,
)
from model_zoo.layers.quantized_gemm.int8.gemm import Int8Gemm, Int8GemmByRows, int8_gemms
from model_zoo.layers.quantized_gemm.packed_many_rows import PackedManyRowsGemm, usual_gemm
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm
from model_zoo.layers.quantized_rows import Producer
from model_zoo.quantization.weight_scheme import WeightScheme
from runtime.precompile.compiling import compiling_only
from runtime.precompile.pool import Compilers
from tests.support.kernels.quantized_cases import quantized

BF16 = torch.bfloat16
DEVICE = torch.device("cuda", 0)


def scheme(name: str, columns: int, activation_bits: int = 16) -> WeightScheme:
    packed = pack(quantized(name, 128, columns, scales=BF16))
    return WeightScheme(
        kind=packed.kind, row_group=packed.row_group, column_group=packed.column_group,
        scale_dtype=packed.scales.dtype, zeros=packed.zeros is not None,
        row_scales=packed.row_scales is not None, activation_bits=activation_bits,
    )  # fmt: skip


def linear(name: str, outputs: int = 1024, inputs: int = 1024, activation_bits: int = 16) -> Linear:
    of_weight = scheme(name, inputs, activation_bits)
    return Linear(inputs, outputs, bias=True, dtype=BF16, scheme=of_weight)


def use_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    found = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(autotune, "supports_kernels", lambda device, dtype: True)
    fp8 = lambda gemm, device, dtype: capability >= (8, 9)  # noqa: E731
    monkeypatch.setattr(candidates, "runs", fp8)
    int8_gemms.cache_clear()
    monkeypatch.setattr(bands, "processors", lambda device: 132)


@pytest.mark.parametrize("rows", [*BUCKETS, *MANY_BUCKETS])
@pytest.mark.parametrize("name", ["int4 g128", "int4 g32 zeros", "nvfp4", "mxfp4", "fp8 block"])
def test_hoppers_kernel_is_timed_beside_the_default(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int
):
    use_device(monkeypatch, (9, 0))
    first, *others = quantized_candidates(DEVICE, BF16, rows, 6144, 4096, scheme(name, 4096))
    kind = PackedManyRowsGemm if rows > 64 and name != "fp8 block" else SkinnyQuantizedGemm
    hopper = [gemm for gemm in others if isinstance(gemm, kind)]
    assert hopper and not isinstance(first, kind)
    if rows > 64:
        assert first == DequantizeThenCublas()
        assert name != "fp8 block" or others[0] == DequantizeInRegistersUnsplit()


FORMATS = (
    "int4 g128",
    "int4 g32 zeros",
    "int4 row",
    "nvfp4",
    "mxfp4",
    "fp8 row",
    "int8 g128 zeros",
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("outputs", [24576, 4096, 1001])
def test_until_gemms_are_timed_hopper_uses_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, outputs: int
):
    """Which are among those that are tried, so that a start compiles no others."""
    use_device(monkeypatch, (9, 0))
    of_weight = scheme(name, 4096)
    gemms, fallback = untimed(DEVICE, BF16, outputs, 4096, of_weight)
    for rows, gemm in gemms.items():
        tried = quantized_candidates(DEVICE, BF16, rows, outputs, 4096, of_weight)
        assert gemm in tried and isinstance(gemm, SkinnyQuantizedGemm | PackedManyRowsGemm)
    many = name[:4] in ("int4", "nvfp", "mxfp") and outputs % 8 == 0
    assert list(gemms) == [*BUCKETS, *(PACKED_BUCKETS if many else ())]
    assert fallback == (PackedManyRowsGemm(256) if many else DequantizeThenCublas())
    use_device(monkeypatch, (8, 0))
    gemms, fallback = untimed(DEVICE, BF16, outputs, 4096, of_weight)
    assert set(gemms.values()) == {DequantizeInRegistersUnsplit()}
    assert fallback == DequantizeThenCublas()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "fastest"),
    [
        (128, 4096, 4096, {(64, 2)}),
        (128, 24576, 4096, {(128, 1)}),
        (128, 4096, 12288, {(128, 4), (64, 2)}),
        (256, 4096, 12288, {(128, 2)}),
        (512, 24576, 4096, {(256, 1)}),
        (1024, 6144, 4096, {(128, 1)}),
    ],
)
def test_the_usual_gemm_is_one_of_the_fastest_on_an_h200(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    outputs: int,
    inputs: int,
    fastest: set[tuple[int, int]],
):
    """Of Qwen3-8B's, by the measurements in docs/lab/quantized-weights.md: the two fastest."""
    use_device(monkeypatch, (9, 0))
    of_weight = scheme("int4 g128", inputs)
    gemm = usual_gemm(DEVICE, BF16, rows, outputs, inputs, of_weight)
    assert gemm is not None and (gemm.width, gemm.parts) in fastest


def test_few_tiles_are_tried_in_parts(monkeypatch: pytest.MonkeyPatch):
    use_device(monkeypatch, (9, 0))

    def tried(rows: int, outputs: int, inputs: int) -> set[tuple[int, int]]:
        of_weight = scheme("int4 g128", inputs)
        found = quantized_candidates(DEVICE, BF16, rows, outputs, inputs, of_weight)
        return {(gemm.width, gemm.parts) for gemm in found if isinstance(gemm, PackedManyRowsGemm)}

    assert tried(128, 4096, 12288) == {(64, 1), (64, 2), (128, 1), (128, 2), (128, 4)}
    assert tried(256, 24576, 4096) == {(64, 1), (128, 1), (256, 1)}, "as they are they fill it"
    assert tried(128, 4096, 3328) == {(64, 1), (128, 1)}, "13 times 256 columns"


def test_other_devices_and_scales_have_the_plain_kernels(monkeypatch: pytest.MonkeyPatch):
    use_device(monkeypatch, (9, 0))
    found = quantized_candidates(DEVICE, BF16, 8, 6144, 4096, scheme("int4 row zeros", 4096))
    assert not [gemm for gemm in found if isinstance(gemm, SkinnyQuantizedGemm)]
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        use_device(monkeypatch, capability)
        found = quantized_candidates(DEVICE, BF16, 8, 6144, 4096, scheme("int4 g128", 4096))
        assert found and not [gemm for gemm in found if isinstance(gemm, SkinnyQuantizedGemm)]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_int8_activations_are_timed_for_few_rows_and_used_for_many(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
):
    use_device(monkeypatch, capability)
    of_weight = scheme("int8 row", 4096, activation_bits=8)
    for rows in (*BUCKETS, *MANY_BUCKETS):
        found = quantized_candidates(DEVICE, BF16, rows, 6144, 4096, of_weight)
        integers = [isinstance(gemm, Int8Gemm) for gemm in found]
        assert sum(integers) >= 2 and (all(integers) if rows > 64 else not integers[0])
    plain = quantized_candidates(DEVICE, BF16, 8, 6144, 4096, scheme("int8 row", 4096))
    assert not any(isinstance(gemm, Int8Gemm) for gemm in plain), "W8A16"


def test_int8_activations_need_no_measurement():
    layer = linear("int8 row", activation_bits=8)
    use_quantized_gemms(nn.Sequential(layer))
    assert {layer.gemm_of(rows) for rows in (1, 64, 65, 9999)} == {Int8GemmByRows("int8")}


def rows_of(layer: Linear) -> list[int]:
    return [gemm_key.rows for gemm_key in layers_by_key(nn.Sequential(layer))]


def test_many_rows_are_tuned_where_cublas_has_no_product(monkeypatch: pytest.MonkeyPatch):
    use_device(monkeypatch, (9, 0))
    assert rows_of(linear("int4 g128")) == [*BUCKETS, *PACKED_BUCKETS]
    assert rows_of(linear("nvfp4")) == [*BUCKETS, *PACKED_BUCKETS]
    assert rows_of(linear("fp8 row")) == [*BUCKETS, *MANY_BUCKETS], "W8A16"
    assert rows_of(linear("fp8 row", activation_bits=8)) == [*BUCKETS], "fp8 tensor cores"
    assert rows_of(linear("int4 row zeros")) == [*BUCKETS]
    assert rows_of(linear("int8 row", activation_bits=8)) == [*BUCKETS, *MANY_BUCKETS, 1024]
    use_device(monkeypatch, (8, 0))
    assert rows_of(linear("int4 g128")) == [*BUCKETS]
    assert rows_of(linear("int8 row", activation_bits=8)) == [*BUCKETS, *MANY_BUCKETS, 1024]


def test_hoppers_fp8_kernel_of_many_rows_is_tried_without_a_bias(monkeypatch: pytest.MonkeyPatch):
    use_device(monkeypatch, (9, 0))
    layer = linear("fp8 row", activation_bits=8)
    assert rows_of(layer) == [*BUCKETS]
    layer.bias = None
    assert rows_of(layer) == [*BUCKETS, *FP8_BUCKETS]
    use_device(monkeypatch, (12, 0))
    assert rows_of(layer) == [*BUCKETS]
    layer.may_leave_scales = True
    assert rows_of(layer) == [*BUCKETS, 128, 256, 384]


def test_scales_are_left_to_the_next_kernel_for_some_hundred_rows_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
):
    use_device(monkeypatch, (9, 0))
    layer = linear("fp8 row", activation_bits=8)
    layer.bias, layer.may_leave_scales = None, True
    assert rows_of(layer) == [*BUCKETS, *FP8_BUCKETS]
    by_rows = {gemm_key.rows: gemm_key for gemm_key in layers_by_key(nn.Sequential(layer))}
    for rows, gemm_key in by_rows.items():
        found = autotune.candidates_for(gemm_key, DEVICE)
        assert (UnscaledMM() in found) == (64 < rows <= 384)
        assert (Fp8ManyRowsGemm() in found) == (rows > 64)
        assert rows <= 64 or found[0] == ScaledMM("row", fast_accum=True)
    with leaving_scales(nn.Sequential(layer)) as some:
        assert some and {layer.gemm_of(rows) for rows in (1, 64, 5000)} == {UnscaledMM()}
    assert layer.gemm_of(1) is None, "what it had before"


@pytest.mark.parametrize(
    "reason", ["bias", "blocks", "float16", "W8A16", "int4", "nothing scales", "deterministic"]
)
def test_scales_stay_with_the_gemm_where_nothing_else_can_multiply_them(
    monkeypatch: pytest.MonkeyPatch, reason: str
):
    use_device(monkeypatch, (9, 0))
    name = {"blocks": "fp8 block", "int4": "int4 g128"}.get(reason, "fp8 row")
    layer = linear(name, activation_bits=16 if reason in ("W8A16", "int4") else 8)
    layer.may_leave_scales = reason != "nothing scales"
    layer.dtype = torch.float16 if reason == "float16" else BF16
    layer.is_batch_invariant = reason == "deterministic"
    if reason != "bias":
        layer.bias = None
    assert not any(found.leaves_scales for found in layers_by_key(nn.Sequential(layer)))
    with leaving_scales(nn.Sequential(layer)) as some:
        assert not some and layer.gemm_of(128) is None


def test_scales_of_columns_are_bfloat16_where_no_digit_is_lost():
    for scales, exact in ((0.25, True), (0.3, False)):
        layer = linear("fp8 row", outputs=64, activation_bits=8)
        assert layer.packed is not None
        weight = quantized("fp8 row", 64, 1024)
        layer.packed.store(0, replace(weight, scales=torch.full_like(weight.scales, scales)))
        assert layer.packed.weight.narrow_scales is not None, "kernels are compiled for it"
        layer.prepare()
        narrow = layer.packed.weight.narrow_scales
        assert (narrow is not None) == exact
        assert narrow is None or torch.equal(narrow, torch.full((64,), 0.25, dtype=BF16))
    for name in ("fp8 block", "int8 row", "int4 g128"):
        packed = linear(name, activation_bits=8).packed
        assert packed is not None and packed.weight.narrow_scales is None


def test_every_candidate_can_be_kept_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use_device(monkeypatch, (9, 0))
    made = {
        f"{name} {rows} {number}": gemm
        for rows in (*BUCKETS, *MANY_BUCKETS)
        for name in ("fp8 row", "int8 row", "int4 g128")
        for number, gemm in enumerate(
            quantized_candidates(DEVICE, BF16, rows, 6144, 4096, scheme(name, 4096, 8))
        )
    } | {"unscaled": UnscaledMM()}
    kinds = {type(gemm).__name__ for gemm in made.values()}
    assert len(kinds) == 9 and {ScaledMM.__name__, Int8Gemm.__name__} <= kinds
    write_choices(tmp_path / "products.json", "GPU", made)
    assert read_choices(tmp_path / "products.json", "GPU") == made


def test_a_choice_for_many_rows_leaves_the_others_as_they_are():
    layer = linear("int4 g128")
    use_quantized_gemms(nn.Sequential(layer))
    chosen = SkinnyQuantizedGemm(128, 256, 6, 132)
    gemm_key = GemmKey(1024, 1024, BF16, True, 256, scheme=scheme("int4 g128", 1024))
    use({gemm_key: [layer]}, {gemm_key: chosen})
    unsplit = DequantizeInRegistersUnsplit()
    assert [layer.gemm_of(rows) for rows in (1, 64)] == [unsplit, unsplit]
    assert layer.gemm_of(257) == DequantizeThenCublas()
    assert [layer.gemm_of(rows) for rows in (65, 256)] == [chosen, chosen]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8 row", "fp8 block", "int8 row"])
@pytest.mark.parametrize("after", ["norm", "silu_mul", None])
def test_products_of_quantized_activations_are_chosen_with_the_kernel_before(
    after: Producer | None, name: str, tmp_path: Path
):
    of_weight = scheme(name, 2048, activation_bits=8)
    with torch.device("cuda"):
        layer = Linear(2048, 1536, bias=True, dtype=BF16, scheme=of_weight, after=after)
    assert layer.packed is not None and layer.bias is not None
    weight = quantized(name, 1536, 2048, device="cuda", scales=BF16)
    layer.packed.store(0, weight)
    nn.init.normal_(layer.bias)
    model = nn.Sequential(layer)
    use_quantized_gemms(model)
    with compiling_only(Compilers()):
        run_candidates(model)
    file = tmp_path / "products.json"
    autotune_gemms(model, seconds=60, file=file)
    assert ("after" in file.read_text()) == (after is not None)
    plain = weight.dequantize(BF16)
    for rows in (1, 16, 64, 65, 513):
        x = torch.randn(rows, 2048, dtype=BF16, device="cuda")
        expected = nn.functional.linear(x.float(), plain.float(), layer.bias.float())
        scales = layer.input_scales(rows)
        outputs = [layer(x)] + ([] if scales is None else [layer(quantize_rows(x, scales))])
        for y in outputs:
            error = (y.float() - expected).norm() / expected.norm()
            assert error < 0.06, (rows, layer.gemm_of(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4 g128", "nvfp4", "mxfp4", "fp8 row"])
def test_what_is_chosen_on_a_gpu_multiplies_rightly(name: str, tmp_path: Path):
    layer = linear(name, 1536, 2048).cuda()
    assert layer.packed is not None and layer.bias is not None
    weight = quantized(name, 1536, 2048, device="cuda", scales=BF16)
    layer.packed.store(0, weight)
    nn.init.normal_(layer.bias)
    model = nn.Sequential(layer)
    use_quantized_gemms(model)
    with compiling_only(Compilers()):  # on all cores
        run_candidates(model)
    autotune_gemms(model, seconds=60, file=tmp_path / "products.json")
    plain = weight.dequantize(BF16)
    for rows in (1, 7, 33, 64, 65, 130, 500, 513):
        x = torch.randn(rows, 2048, dtype=BF16, device="cuda")
        expected = nn.functional.linear(x.float(), plain.float(), layer.bias.float())
        error = (layer(x).float() - expected).norm() / expected.norm()
        assert error < 0.06, (rows, layer.gemm_of(rows))
