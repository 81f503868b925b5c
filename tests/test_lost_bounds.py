"""The search for numbers that Triton loses in nested loops."""

from __future__ import annotations

import pytest

from tests.support.machine_code.lost_bounds import lost_bounds

NESTED = """
module {
  tt.func public @kernel(%OUT: !tt.ptr<f32>, %n: i32) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %zero = arith.constant 0.0 : f32
    %r:2 = scf.for %p = %c0 to %n step %c1 iter_args(%s = %zero, %b = %c0) -> (f32, i32)  : i32 {
      %end = arith.addi %p, %c1 : i32
      %t = scf.for %i = %b to %end step %c1 iter_args(%u = %s) -> (f32)  : i32 {
        %v = arith.addf %u, %u : f32
        scf.yield %v : f32
      }
      LINE
      scf.yield %t, %end : f32, i32
    }
    tt.store %OUT, %r#0 : !tt.ptr<f32>
    tt.return
  }
}
"""


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("", ["loop 0: number 1"]),
        ("tt.store %OUT, %end : !tt.ptr<i32>", []),
        ("tt.store %OUT, %b : !tt.ptr<i32>", []),
    ],
)
def test_a_number_that_only_bounds_an_inner_loop_is_lost(line: str, lost: list[str]):
    found = lost_bounds(NESTED.replace("LINE", line))
    assert found == lost
