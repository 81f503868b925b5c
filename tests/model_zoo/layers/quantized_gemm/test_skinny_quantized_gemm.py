"""SkinnyQuantizedGemm against float64: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import SHARED_BYTES, workspace
from model_zoo.layers.quantized_gemm.hopper.arguments import format_arguments
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm, multiplies
from model_zoo.layers.quantized_gemm.skinny_candidates import skinny_candidates
from model_zoo.quantization.quantized_weight import BITS, QuantizedWeight
from runtime.precompile.compiling import compiling_only
from runtime.precompile.pool import Compilers
from tests.support.kernels.quantized_cases import KINDS, interpreted_skinny_gemm, quantized

BF16, FP16 = torch.bfloat16, torch.float16
SERVED = [name for name in KINDS if name != "int4 row zeros"]
WHOLE = SkinnyQuantizedGemm(64, 256, 2, 1, split_units=3, x_stages=2)
SPLIT = SkinnyQuantizedGemm(64, 256, 2, 4, x_stages=2)
TWO_WARPGROUPS = SkinnyQuantizedGemm(128, 256, 2, 3, x_stages=1)
SYNC = SkinnyQuantizedGemm(64, 256, 2, 4, x_stages=2, sync=True)
SYNC_TWO_WARPGROUPS = SkinnyQuantizedGemm(128, 256, 2, 3, x_stages=1, sync=True)
STACKED = SkinnyQuantizedGemm(16, 1024, 2, 5, x_stages=1)
SYNC_STACKED = SkinnyQuantizedGemm(16, 1024, 2, 5, x_stages=1, sync=True)
APART = SkinnyQuantizedGemm(64, 512, 2, 4, x_stages=2, sync=True, apart=True)
APART_HALF_TILES = SkinnyQuantizedGemm(32, 1024, 2, 3, 2, x_stages=1, sync=True, apart=True)
SYNC_TWO_RUNS = SkinnyQuantizedGemm(32, 512, 2, 3, split_units=2, x_stages=1, sync=True)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with interpreted_skinny_gemm():
        yield


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def check(gemm: SkinnyQuantizedGemm, x: Tensor, weight: QuantizedWeight, bias: Tensor | None):
    """That the error is at most twice that of float32 sums of weights rounded to x's type, that the
    next product has the same bits, and that no partial sum is left."""
    packed = pack(weight)
    y = gemm.run(x, packed, bias)
    exact = x.double() @ weight.dequantize(torch.float32).double().T
    single = x.float() @ weight.dequantize(x.dtype).float().T
    if bias is not None:
        exact, single = exact + bias.double(), single + bias.float()
    limit = 2 * (single.to(x.dtype).double() - exact).norm() + 1e-9
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert (y.double() - exact).norm() <= limit
    assert torch.equal(gemm.run(x, packed, bias), y)
    assert int(workspace(x.device)[1].sum()) == 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gemm", [SPLIT, SYNC], ids=["wgmma", "mma.sync"])
def test_products_of_every_kind_are_right(gemm: SkinnyQuantizedGemm, name: str, dtype: torch.dtype):
    weight = quantized(name, 77, 640, scales=dtype)
    check(gemm, numbers("cpu", dtype, 3, 640), weight, numbers("cpu", dtype, 77))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "name", [name for name in SERVED if name.startswith(("int4", "nv", "mxfp4"))]
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gemm", [APART, APART_HALF_TILES], ids=str)
def test_products_of_warps_with_columns_of_their_own_are_right(
    gemm: SkinnyQuantizedGemm, name: str, dtype: torch.dtype
):
    weight = quantized(name, 88, 1152, scales=dtype)
    for rows in (3, 12, 27):
        check(gemm, numbers("cpu", dtype, rows, 1152), weight, numbers("cpu", dtype, 88))


@pytest.mark.usefixtures("on_cpu")
def test_large_values_of_a_few_columns_are_multiplied_right():
    """Zero points are taken off the sums of products, and x is multiplied by up to 2^64."""
    weight, x = quantized("int4 g128", 64, 1024), numbers("cpu", BF16, 4, 1024)
    x[:, [5, 700]] *= 1000
    check(APART, x, weight, None)
    check(APART, (x.double() * 2.0**50).to(BF16), weight, None)


def test_codes_are_multiplied_as_they_are_where_zero_points_are_few():
    def raw(name: str, dtype: torch.dtype) -> bool:
        weight = pack(quantized(name, 64, 1024, scales=dtype))
        return format_arguments(weight, dtype, 1024, True, apart=True).raw

    assert raw("int4 g128", BF16) and raw("int4 g64 zeros", BF16)
    assert not raw("int4 g32 zeros", BF16) and not raw("int4 g128", FP16) and not raw("nvfp4", BF16)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", [WHOLE, APART, SYNC_STACKED], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_what_lies_behind_the_rows_of_x_does_not_matter(gemm: SkinnyQuantizedGemm, rows: int):
    weight = pack(quantized("int4 g128", 88, 1024))
    if not gemm.serves(rows, 88, 1024, weight):
        pytest.skip("of fewer rows")
    behind = torch.full((16, 1024), torch.nan, dtype=BF16)
    x = behind[:rows].copy_(numbers("cpu", BF16, rows, 1024))
    y = gemm.run(x, weight, None)
    assert y.shape == (rows, 88) and torch.equal(y, gemm.run(x.clone(), weight, None))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["int4 g32 zeros", "nvfp4", "fp8 block", "int8 row"])
@pytest.mark.parametrize(
    "gemm",
    [WHOLE, TWO_WARPGROUPS, SYNC_TWO_WARPGROUPS, STACKED, SYNC_STACKED, SYNC_TWO_RUNS],
    ids=str,
)
def test_whole_tiles_two_warpgroups_and_stacked_runs_are_right(
    gemm: SkinnyQuantizedGemm, name: str
):
    rows = 8 if gemm.fold > 1 else 16 if gemm.sync else 17
    check(
        gemm,
        numbers("cpu", BF16, rows, 640),
        quantized(name, 150, 640),
        None,
    )


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("in_flight", "units"), [(1, 1), (20, 2), (64, 4)])
def test_products_are_right_with_fewer_units_in_flight_than_the_ring_has(
    in_flight: int, units: int
):
    gemm = SkinnyQuantizedGemm(64, 256, 4, 3, x_stages=2, in_flight=in_flight)
    assert gemm.ahead(4) == units
    weight = quantized("int4 g128", 150, 1536)
    check(gemm, numbers("cpu", BF16, 5, 1536), weight, numbers("cpu", BF16, 150))


@pytest.mark.usefixtures("on_cpu")
def test_act_order_multiplies_each_column_of_x_by_its_weights():
    weight = quantized("int4 g32 zeros", 33, 256, permuted=True)
    check(SPLIT, numbers("cpu", FP16, 3, 256), weight, None)


def test_weights_that_the_kernel_does_not_know_are_not_served():
    def serves(name: str, columns: int = 768) -> bool:
        return SPLIT.serves(64, 64, columns, pack(quantized(name, 64, columns)))

    assert serves("int4 g128") and serves("nvfp4") and serves("int4 row")
    assert not serves("int4 row zeros"), "one zero point a row"
    assert APART.serves(16, 64, 512, pack(quantized("nvfp4", 64, 512)))
    assert not APART.serves(16, 60, 512, pack(quantized("nvfp4", 60, 512))), "eight rows at once"
    assert not APART.serves(16, 64, 512, pack(quantized("fp8 row", 64, 512))), "of 4 bits alone"
    assert not multiplies(replace(pack(quantized("nvfp4", 1, 128)), row_scales=None), 128)
    assert not multiplies(replace(pack(quantized("fp8 block", 1, 128)), column_group=64), 128)


@pytest.mark.usefixtures("on_cpu")
def test_more_rows_than_a_tile_has_are_multiplied_in_turn():
    x = numbers("cpu", BF16, 130, 512)
    check(SPLIT, x, quantized("int4 g128", 40, 512), numbers("cpu", BF16, 40))
    weight = pack(quantized("nvfp4", 40, 512))
    whole = SPLIT.run(x, weight, None)
    assert torch.equal(SPLIT.run(x[64:128], weight, None), whole[64:128])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 512])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (24576, 4096), (1536, 512)])
def test_candidates_fit_shared_memory_and_the_workspace(
    shape: tuple[int, int], rows: int, bits: int
):
    weight = pack(quantized("int4 g128" if bits == 4 else "int8 row", 1, shape[1]))
    candidates = skinny_candidates(132, rows, *shape, bits)
    assert candidates
    for gemm in candidates:
        assert gemm.serves(rows, *shape, weight), gemm


def test_columns_of_their_own_are_tried_for_up_to_32_rows_of_4_bits():
    for rows, expected in ((8, True), (16, True), (32, True), (64, False)):
        gemms = skinny_candidates(132, rows, 6144, 4096, 4)
        assert any(gemm.apart for gemm in gemms) == expected
    assert not APART.serves(33, 64, 512, pack(quantized("int4 g128", 64, 512)))


def test_fewer_units_in_flight_are_compared_in_steps_where_they_are_fewer():
    int4, int8 = (pack(quantized(name, 64, 1024)) for name in ("int4 g128", "int8 row"))
    gemm = SkinnyQuantizedGemm(32, 1024, 4, 264, 1, 2, 128, sync=True, apart=True)
    assert gemm.resident == 2 and gemm.ahead(4) == 2
    [less] = gemm.for_steps(int4)
    assert less.ahead(4) == 1 and replace(less, in_flight=gemm.in_flight) == gemm
    assert not gemm.for_steps(int8), "a unit has 32 KiB, as many as the two may ask for"
    assert not less.for_steps(int4)


def test_the_kernel_is_told_how_many_units_to_ask_for(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **options: asked.extend(arguments)

    kernels = pytest.importorskip("model_zoo.layers.quantized_gemm.skinny_hopper")
    monkeypatch.setattr(kernels, "_skinny_quantized_gemm", Kernel())
    monkeypatch.setattr(SkinnyQuantizedGemm, "ahead", lambda gemm, bits: 7777 + bits)
    SPLIT.run(numbers("cpu", BF16, 5, 1536), pack(quantized("int4 g128", 64, 1536)), None)
    assert [number for number in asked if isinstance(number, int) and number > 7000] == [7781]


def test_where_there_is_at_most_a_tile_for_each_multiprocessor_a_ring_leaves_no_room_for_two():
    def of_ring(outputs: int, inputs: int) -> list[SkinnyQuantizedGemm]:
        found = skinny_candidates(132, 8, outputs, inputs, 4)
        return [gemm for gemm in found if (gemm.block_n, gemm.stages) == (32, 5)]

    [down] = of_ring(4096, 12288)
    assert down.programs == 128 and down.split_units == 12 and down.apart
    assert down.resident == 2, "registers leave room for other kernels"
    sums = 4 * 4 * 32 * 8
    assert 2 * (down.shared_bytes(8, 4) + sums) > SHARED_BYTES
    assert not of_ring(6144, 4096), "192 tiles"


def each_product(
    name: str, dtype: torch.dtype
) -> Iterator[tuple[SkinnyQuantizedGemm, Tensor, QuantizedWeight, Tensor]]:
    """(GEMM, x, weight, bias) of every candidate for some shapes and numbers of rows."""
    for outputs, inputs in ((1001, 4096), (77, 1408), (2048, 6144)):
        weight = quantized(name, outputs, inputs, device="cuda", scales=dtype)
        bias = numbers("cuda", dtype, outputs)
        for rows in (1, 3, 8, 17, 64, 200):
            x = numbers("cuda", dtype, rows, inputs)
            for gemm in skinny_candidates(132, rows, outputs, inputs, BITS[weight.kind]):
                yield gemm, x, weight, bias


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)])
def test_every_candidate_is_right(name: str, dtype: torch.dtype):
    products = list(each_product(name, dtype))
    assert len(products) > 50
    with compiling_only(Compilers()):  # on all cores
        packed = {id(weight): pack(weight) for _, _, weight, _ in products}
        for gemm, x, weight, bias in products:
            gemm.run(x, packed[id(weight)], bias)
    for gemm, x, weight, bias in products:
        check(gemm, x, weight, bias)
