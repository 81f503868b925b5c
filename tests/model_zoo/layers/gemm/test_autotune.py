"""How linear layers choose their GEMM kernels: timed, chosen, kept in a file, used by rows."""

from __future__ import annotations

import ast
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model_zoo.layers.gemm import autotune as choosing
from model_zoo.layers.gemm import autotune_cache as keeping
from model_zoo.layers.gemm.autotune import (
    GemmKey,
    autotune_gemms,
    choose,
    gate_of,
    layers_by_key,
    runnable,
    use,
)
from model_zoo.layers.gemm.autotune_cache import (
    chosen_file,
    digest,
    read_choices,
    sources,
    write_choices,
)
from model_zoo.layers.gemm.candidates import gemm_candidates
from model_zoo.layers.gemm.implementations import BUCKETS, CublasGemm, GemmImpl, SkinnyGemm, SplitK
from model_zoo.layers.gemm.swiglu import SIZES, SwigluGemm, UnfusedSwiglu
from model_zoo.layers.linear import Linear
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.quantization.weight_scheme import WeightScheme

WAYS: list[GemmImpl] = [CublasGemm(), SkinnyGemm(64, 128, 4, 132), SplitK(32, 128, 2)]


def layer(outputs: int = 16, inputs: int = 8) -> Linear:
    made = Linear(inputs, outputs, bias=False, dtype=torch.float32)
    nn.init.normal_(made.weight)
    return made


def place(rows: int) -> GemmKey:
    return GemmKey(16, 8, torch.float32, False, rows)


@pytest.mark.parametrize(
    ("microseconds", "chosen"),
    [
        ([10.0, 9.0, 8.0], WAYS[2]),
        ([10.0, 9.7, 12.0], WAYS[1]),
        ([10.0, 9.9, 9.81], WAYS[0]),  # not clearly faster
        ([10.0, 11.0, 12.0], WAYS[0]),
    ],
)
def test_cublas_stays_unless_another_is_clearly_faster(microseconds: list[float], chosen: GemmImpl):
    found = choose({place(1): [layer()]}, lambda _: WAYS, lambda *_: microseconds, 60.0)
    assert found[place(1)][0] == chosen


@pytest.mark.parametrize(
    ("microseconds", "chosen"),
    [
        ([100.0, 94.0], SwigluGemm()),
        ([100.0, 96.0], UnfusedSwiglu()),
        ([100.0, 110.0], UnfusedSwiglu()),
    ],
)
def test_a_gated_gemm_is_to_be_faster_by_what_it_may_lose_under_load(
    microseconds: list[float], chosen: GemmImpl
):
    many = GemmKey(32, 8, torch.bfloat16, False, 1024, swiglu=True)
    found = choose(
        {many: [layer(32)]}, lambda _: [UnfusedSwiglu(), SwigluGemm()], lambda *_: microseconds, 9
    )
    assert found[many][0] == chosen


def test_gated_layers_have_shapes_of_many_rows_the_most_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choosing, "supports_kernels", lambda device, dtype: True)
    block = SwigluLinear(8, 16, bias=False, dtype=torch.float32)
    places = list(layers_by_key(nn.Sequential(layer(), block)))
    few, many = places[: 2 * len(BUCKETS)], places[2 * len(BUCKETS) :]
    assert not any(found.swiglu for found in few) and {found.outputs for found in few} == {16, 32}
    assert [found.rows for found in many] == sorted(SIZES, reverse=True)
    assert all(found.swiglu and found.outputs == 32 for found in many)
    assert len({str(found) for found in places}) == len(places), "names in the file"


def test_gemms_of_gated_layers_are_timed_with_their_activation():
    gated = SwigluLinear(8, 16, bias=False, dtype=torch.float32)
    gelu = SwigluLinear(8, 16, bias=False, dtype=torch.float32, gelu=True)
    few, many = place(8), replace(place(96), swiglu=True)
    assert gate_of(few, [gated, gated]) == "silu" and gate_of(few, [gelu]) == "gelu"
    assert (
        gate_of(few, [layer()]) is gate_of(few, [gated, layer()]) is gate_of(many, [gated]) is None
    )
    int8 = WeightScheme(
        kind="int8", row_group=1, column_group=8, scale_dtype=torch.float32, activation_bits=8
    )
    weights = replace(int8, activation_bits=16)
    assert gate_of(replace(few, scheme=int8), [gated]) is None
    assert gate_of(replace(few, scheme=weights), [gated]) == "silu"
    asked: list[object] = []

    def times(*arguments: object) -> list[float]:
        asked.append(arguments[-1])
        return [3.0, 2.0, 1.0]

    choose({few: [gated], replace(few, rows=16): [layer()]}, lambda _: WAYS, times, 60.0)
    assert asked == ["silu", None]


def test_a_shape_with_one_implementation_gets_it():
    found = choose({place(1): [layer()]}, lambda _: WAYS[:1], lambda *_: [0.0], 60.0)
    assert found == {place(1): [CublasGemm()]}


def test_places_that_come_too_late_are_left_out_and_logged(caplog: pytest.LogCaptureFixture):
    places = {place(rows): [layer()] for rows in BUCKETS}
    with caplog.at_level(logging.WARNING):
        assert choose(places, lambda _: WAYS, lambda *_: [3.0, 2.0, 1.0], -1.0) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "5 of 5 GEMMs are not timed: no time"
    ]


def test_a_gemm_that_the_device_is_too_small_for_is_not_tried():
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not here")

    class TooLarge(CublasGemm):
        def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            raise errors.OutOfResources(128 << 10, 99 << 10, "shared memory")

    assert runnable([CublasGemm(), TooLarge(), CublasGemm(rows=8)], 1, layer()) == [
        CublasGemm(),
        CublasGemm(rows=8),
    ]


def test_a_gemm_that_computes_something_else_is_not_tried(caplog: pytest.LogCaptureFixture):
    class Wrong(CublasGemm):
        def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            product = x @ weight.T
            product[:, -4:] = factor * product[:, -4:]
            return product

    found = layer(64, 128)
    for factor, kept in ((1.0, True), (0.0, False), (-1.0, False), (float("nan"), False)):
        gemms = [CublasGemm(), Wrong(), CublasGemm(rows=8)]
        expected = gemms if kept else [gemms[0], gemms[2]]
        assert runnable(gemms, 4, found) == expected, factor
    assert len(caplog.records) == 3 and "differs from that of CublasGemm(rows=0) by" in caplog.text


class CountingGemm:
    """A GEMM that records that it ran."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.rows.append(len(x))
        return x @ weight.T


def test_the_number_of_rows_chooses_the_gemm_that_runs():
    few, many, found = CountingGemm(), CountingGemm(), layer()
    use({place(8): [found], place(64): [found]}, {place(8): few, place(64): many})  # pyright: ignore[reportArgumentType]
    for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 300):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(found(x), x @ found.weight.T)
    assert few.rows == [2, 8] and many.rows == [33, 64], "others are left to PyTorch"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_all_that_is_tried_serves_and_cublas_comes_first(capability: tuple[int, int]):
    for outputs, inputs in ((6144, 4096), (64, 8), (151936, 1024), (100, 1000), (1, 16)):
        for rows in BUCKETS:
            tried = gemm_candidates(132, capability, rows, outputs, inputs)
            assert tried[0] == CublasGemm() and len(set(tried)) == len(tried)
            assert all(gemm.serves(rows, outputs, inputs) for gemm in tried)
            streams = [gemm for gemm in tried if isinstance(gemm, SkinnyGemm)]
            assert not streams or capability == (9, 0)


@pytest.mark.parametrize("outputs", [6144, 4096, 24576, 151936, 1024, 333])
def test_whole_tiles_are_shared_by_as_few_programs_as_are_as_fast(outputs: int):
    for stream in gemm_candidates(132, (9, 0), 8, outputs, 4096)[1:-1]:
        assert isinstance(stream, SkinnyGemm) and stream.split_units * stream.block_k == 4096
        tiles = -(-outputs // stream.block_n)
        most = -(-tiles // 132)
        assert -(-tiles // stream.programs) == most
        fewest = stream.programs == 1 or -(-tiles // (stream.programs - 1)) > most
        assert fewest or stream.programs == 132


def test_tiles_that_leave_programs_idle_are_tried_on_all_of_them_too():
    def of_32_rows(outputs: int) -> list[int]:
        tried = gemm_candidates(132, (9, 0), 8, outputs, 4096)
        whole = [gemm for gemm in tried if isinstance(gemm, SkinnyGemm) and gemm.block_n == 32]
        return [gemm.programs for gemm in whole]

    assert of_32_rows(6144) == [96, 132]  # 192 tiles: two each, or one or two
    assert of_32_rows(4096) == [128] and of_32_rows(3072) == [96]  # no more tiles than programs
    assert of_32_rows(2 * 132 * 32) == [132]


def test_what_is_chosen_for_many_rows_leaves_few_rows_alone():
    few, many = CountingGemm(), CountingGemm()
    block = SwigluLinear(8, 16, bias=False, dtype=torch.float32)
    nn.init.normal_(block.weight)
    places = {place(64): few, GemmKey(32, 8, torch.float32, False, 96, swiglu=True): many}
    use({found: [block] for found in places}, places)  # pyright: ignore[reportArgumentType]
    for rows in (33, 64, 65, 96, 97):
        block.swiglu(torch.randn(rows, 8))
    assert few.rows == [33, 64] and many.rows == [65, 96]


def test_layers_on_a_cpu_have_no_choice(tmp_path: Path):
    model = nn.Sequential(layer(), layer())
    assert layers_by_key(model) == {}
    autotune_gemms(model, file=tmp_path / "products.json")
    assert list(tmp_path.iterdir()) == []


def test_choices_are_kept_for_the_same_circumstances_only(tmp_path: Path):
    file = tmp_path / "cache" / "products.json"
    write_choices(file, "GPU A, torch 1, abc", {"x": WAYS[1]})
    write_choices(file, "GPU A, torch 1, abc", {"y": WAYS[2]})
    write_choices(file, "GPU B, torch 1, abc", {"x": WAYS[0]})
    assert read_choices(file, "GPU A, torch 1, abc") == {"x": WAYS[1], "y": WAYS[2]}
    assert read_choices(file, "GPU A, torch 2, abc") == {}
    write_choices(file, "GPU A, torch 2, abc", {"x": WAYS[2]})
    assert read_choices(file, "GPU A, torch 1, abc") == {}, "an upgrade leaves nothing behind"
    assert read_choices(file, "GPU B, torch 1, abc") == {"x": WAYS[0]}
    assert [path.name for path in file.parent.iterdir()] == ["products.json"]


def test_servers_that_write_at_the_same_time_keep_each_others_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, read = tmp_path / "products.json", keeping._read

    def read_slowly(file: Path) -> dict[str, keeping.Written]:
        found = read(file)
        time.sleep(0.05)  # the others would write meanwhile
        return found

    monkeypatch.setattr(keeping, "_read", read_slowly)
    threads = [
        threading.Thread(target=write_choices, args=(file, "GPU", {str(number): WAYS[number]}))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_choices(file, "GPU") == {str(number): WAYS[number] for number in range(3)}


def test_a_process_that_keeps_the_lock_holds_no_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeping, "LOCK_SECONDS", 0.02)
    with keeping._locked(tmp_path):
        write_choices(tmp_path / "products.json", "GPU", {"x": WAYS[1]})
    assert read_choices(tmp_path / "products.json", "GPU") == {"x": WAYS[1]}


def test_choices_depend_on_the_source_of_all_that_is_timed(tmp_path: Path):
    """What the folder imports, but for where files lie; and what any kernel does."""
    origins: set[Path] = set()
    for file in sources():
        text = file.read_text()
        has_kernel = "\n@triton.jit" in text or "\n@gluon.jit" in text
        if not has_kernel and file.parent != Path(keeping.__file__).parent:
            continue
        for node in ast.walk(ast.parse(text)):
            module = (isinstance(node, ast.ImportFrom) and node.module) or ""
            found = module.startswith(("model_zoo.", "attention.")) and find_spec(module)
            if found and module != "attention.planner.costs":
                origins.add(Path(found.origin or ""))
    assert {path.resolve() for path in origins} <= {path.resolve() for path in sources()}
    names = {"linear.py", "silu_mul.py", "dependent_launch.py", "softmax.py", "moe_config.py"}
    assert names <= {path.name for path in origins}
    changed = tmp_path / "linear.py"
    changed.write_text("a faster way\n")
    assert digest([changed]) != digest(sources())


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"\xff\x00",
        b'{"GPU": {"x": {"gemm": "Magic"}}}',
        b'{"GPU": {"x": {"gemm": "SkinnyGemm", "block_n": "64"}}}',
        b'{"GPU": {"x": {"gemm": "SplitK", "block_n": -1, "block_k": 1, "parts": 1}}}',
        b'{"GPU": {"x": {"gemm": "CublasGemm", "columns": 1}}}',
        b'{"GPU": {"x": {"gemm": "CublasGemm", "rows": null}}}',
        b'{"GPU": {"x": {"gemm": "CublasGemm", "rows": true}}}',
        b'{"GPU": {"x": {"gemm": "ScaledMM", "kind": "column", "fast_accum": true}}}',
        b'{"GPU": {"x": {"gemm": "ScaledMM", "kind": "row", "fast_accum": 1}}}',
        b'{"GPU": 7}',
    ],
)
def test_a_damaged_file_is_ignored_with_one_line_and_written_anew(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "products.json"
    file.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert read_choices(file, "GPU") == {}
    assert len(caplog.records) == 1 and str(file) in caplog.text
    write_choices(file, "GPU", {"x": WAYS[1]})
    assert read_choices(file, "GPU") == {"x": WAYS[1]}


def test_what_another_version_wrote_is_left_alone_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "products.json"
    file.write_text('{"GPU B, torch 1": {"x": {"gemm": "Magic", "power": 9}}}')
    write_choices(file, "GPU A, torch 1", {"x": WAYS[1]})
    assert read_choices(file, "GPU A, torch 1") == {"x": WAYS[1]}
    assert "Magic" in file.read_text() and not caplog.records


def test_a_folder_that_cannot_be_written_costs_a_line_and_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        write_choices(tmp_path / "file" / "products.json", "GPU", {"x": WAYS[0]})
    assert "not kept" in caplog.text


def test_choices_lie_in_the_users_cache(tmp_path: Path):
    assert chosen_file({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "wavefill" / "products.json"


@pytest.mark.gpu
def test_choosing_on_a_gpu_leaves_results_and_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "products.json"

    def model() -> nn.Sequential:
        with torch.device("cuda"):
            made = [
                Linear(n, m, bias=True, dtype=torch.bfloat16) for n, m in ((512, 768), (768, 512))
            ]
            block = SwigluLinear(512, 1024, bias=False, dtype=torch.bfloat16)
        for linear in made:
            nn.init.normal_(linear.weight)
            nn.init.normal_(linear.bias)
        nn.init.normal_(block.weight, std=0.05)
        return nn.Sequential(*made, block)

    first = model()
    monkeypatch.setattr(choosing, "SWIGLU_SECONDS", 60)
    autotune_gemms(first, seconds=60, file=file)

    def refused(*_: object) -> Sequence[float]:
        raise AssertionError("timed again")

    monkeypatch.setattr("model_zoo.layers.gemm.timing.times", refused)
    second = model()
    autotune_gemms(second, file=file)
    for rows in (1, 5, 8, 16, 31, 64, 65):
        x = torch.randn(rows, 512, dtype=torch.bfloat16, device="cuda")
        expected = nn.functional.linear(x, second[0].weight, second[0].bias)
        torch.testing.assert_close(second[0](x), expected, rtol=0.02, atol=0.5)
        assert second[1](second[0](x)).shape == (rows, 512)
    for rows in (64, 65, 500, 3000):
        x = torch.randn(rows, 512, dtype=torch.bfloat16, device="cuda")
        gate, up = nn.functional.linear(x, second[2].weight).chunk(2, -1)
        expected = nn.functional.silu(gate) * up
        torch.testing.assert_close(second[2].swiglu(x), expected, rtol=0.03, atol=0.03)
