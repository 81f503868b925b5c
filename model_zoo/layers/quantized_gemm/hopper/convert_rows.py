"""Eight warps that quantize x for skinny_fp8_gemm on Hopper (sm_90), in Gluon.

A unit of x comes from a ring of 16-bit units that a warp loads, and goes to a ring of e4m3 codes in
the order of a weight's, with one scale for each row of the unit: max |x| / 448.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attention.common.hopper import cta_barrier
from model_zoo.layers.gemm.hopper.stream_k import share

LARGEST = gl.constexpr(448.0)  # of e4m3
LEAST = gl.constexpr(1e-10)  # in place of a largest value of 0


@gluon.constexpr_function
def unit_layout(width, columns, warps):
    """A thread's 16 elements of 64 columns become 16 bytes that lie together.

    Column 16 u + 8 i + 2 t + e is byte 16 t + 4 u + 2 e + i: a thread has all u, e and i of one t.
    Threads of eight rows read 4 bytes each of different banks of swizzled memory, and store 16.
    """
    blocks = [[0, 1 << bit] for bit in range(6, 16) if 1 << bit < columns]
    others = blocks + [[1 << bit, 0] for bit in range(3, 8) if 1 << bit < width]
    bits = warps.bit_length() - 1
    across = (others + [[0, 0]] * bits)[:bits]  # warps that have the same, of a small unit
    registers = [[0, 8], [0, 1], [0, 16], [0, 32], *others[bits:]]
    lanes = [[1, 0], [2, 0], [4, 0], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [width, columns])


@gluon.jit
def quantize_units(
    rows, codes, scales, x_full, x_empty, full, empty, N, k_blocks, split_units,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """codes [c_stages, width, columns], scales [c_stages, width] = those of all units of x.

    rows     [x_stages, width, columns], full by x_full; x_empty: they have been read
    full     of codes and scales; empty, of W's ring of STAGES: their products are done
    """
    X_STAGES: gl.constexpr = rows.shape[0]
    C_STAGES: gl.constexpr = codes.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    COLUMNS: gl.constexpr = rows.shape[2]
    layout: gl.constexpr = unit_layout(WIDTH, COLUMNS, gl.num_warps())
    _, count = share(N, k_blocks, split_units, BLOCK_N)
    for i in range(count):
        mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
        x = rows.index(i % X_STAGES).load(layout).to(gl.float32)
        largest = gl.maximum(gl.max(gl.maximum(x, -x), 1), LEAST)
        y = (x * (1.0 / largest * LARGEST)[:, None]).to(gl.float8e4nv)
        y = y.reshape([WIDTH, COLUMNS // 64, 4, 2, 4, 2]).permute((0, 1, 4, 2, 5, 3))
        if i >= C_STAGES:
            before = i - C_STAGES
            mbarrier.wait(empty.index(before % STAGES), (before // STAGES) & 1)
        codes.index(i % C_STAGES).store(y.reshape([WIDTH, COLUMNS]))
        scales.index(i % C_STAGES).store(largest / LARGEST)
        fence_async_shared()
        cta_barrier()  # every warp has read its elements, and stored their codes
        mbarrier.arrive(x_empty.index(i % X_STAGES), count=1)
        mbarrier.arrive(full.index(i % C_STAGES), count=1)
