"""GEMMs that add to the residual, and do their part of norms: interpreted, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from model_zoo.layers.gemm.candidates import gemm_candidates
from model_zoo.layers.gemm.implementations import BUCKETS, SkinnyGemm
from tests.support.gemm.normed_gemm import check_add, check_norm, numbers
from tests.support.interpreter.gluon_interpreter import interpreted

# Whole and split tiles, column runs that are stacked, and the last unit past the end.
SIZES = [
    SkinnyGemm(64, 128, 2, 5, 1, 2),
    SkinnyGemm(64, 64, 3, 3, 2, 1),
    SkinnyGemm(32, 256, 2, 3, 1, 2),
    SkinnyGemm(16, 512, 2, 4, 1, 1),
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    modules = ("rings", "gate", "norm", "stream_k", "skinny_gemm")
    with interpreted("_skinny_gemm", *(f"model_zoo.layers.gemm.hopper.{x}" for x in modules)):
        yield


def weight_of(device: str, outputs: int, inputs: int) -> Tensor:
    return numbers(device, outputs, inputs) / inputs**0.5


def check_product(
    gemm: SkinnyGemm, rows: int, outputs: int, inputs: int, device: str, tiles: int = 37
) -> None:
    weight = weight_of(device, outputs, inputs)
    check_norm(gemm, rows, weight, weight, tiles)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_product_is_added_to_the_residual_and_its_squares_are_summed(gemm: SkinnyGemm, rows: int):
    check_add(gemm, rows, weight_of("cpu", 148, 1024))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_product_is_that_of_the_norm_of_the_residual(gemm: SkinnyGemm, rows: int):
    check_product(gemm, rows, 148, 1024, "cpu")


@pytest.mark.usefixtures("on_cpu")
def test_columns_past_the_end_count_for_nothing():
    check_product(SkinnyGemm(64, 128, 2, 5, 1, 2), 3, 64, 200, "cpu")
    check_product(SkinnyGemm(32, 256, 2, 3, 1, 2), 3, 64, 520, "cpu")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("rows", "tiles"), [(13, 1), (33, 300), (64, 70)])
def test_more_rows_and_more_tiles_of_squares_than_are_loaded_at_once(rows: int, tiles: int):
    gemm = SkinnyGemm(64, 128, 2, 3, 1, 1)
    check_product(gemm, rows, 150, 600, "cpu", tiles)
    check_add(gemm, rows, weight_of("cpu", 151, 200))


@pytest.mark.usefixtures("on_cpu")
def test_a_norm_may_multiply_by_its_weight_plus_one():
    check_add(SIZES[0], 5, weight_of("cpu", 64, 256), plus_one=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 17, 33, 64])
def test_every_candidate_adds_and_normalizes(rows: int):
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    for outputs, inputs in ((4096, 12288), (6144, 4096), (24576, 4096), (1008, 520)):
        for gemm in gemm_candidates(132, (9, 0), bucket, outputs, inputs):
            if isinstance(gemm, SkinnyGemm):
                weight = weight_of("cuda", outputs, inputs)
                check_add(gemm, rows, weight)
                check_add(gemm, rows, weight, plus_one=True)
                check_norm(gemm, rows, weight, weight)
