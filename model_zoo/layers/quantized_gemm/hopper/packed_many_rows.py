"""y = x W^T of many rows and W in 4 bits, on Hopper (sm_90), in Gluon.

packed_many_rows
  grid      persistent: tiles of 128 rows of W by WIDTH rows of x, each in `parts` of its columns;
            programs go through them as in gemm/hopper/many_rows.py
  warps     one loads by TMA: chunks of 256 columns of codes, with which it fills its ring before
            the wait for the preceding kernel, and stages of columns of x.  Two warpgroups have
            64 rows of W each: codes from shared memory to registers, converted there to operand A
            of wgmma, times their scale, while the step before is multiplied
  reads     PackedWeight of int4 or fp4; x [M, K], bf16 or fp16, rows 16-byte aligned; bias [N] or
            None
  writes    y [M, N], by TMA; sums of parts into PARTS, which the last program of a tile to arrive
            adds in their order
  math      weights in the type of x: of groups those of dequantize.py; of fp4, and of rows' scales,
            which multiply the sums, divided by FACTOR.  Sums are float32
  bound     compute: 2 * M * N * K floating-point operations
  checked   tests/model_zoo/layers/quantized_gemm/test_packed_many_rows.py
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.common.hopper import cta_barrier
from model_zoo.layers.gemm.hopper.many_rows import stage_barriers, tile_coords
from model_zoo.layers.quantized_gemm.hopper.convert import (
    columns_layout,
    load_chunk,
    step_words,
    take,
    to_weights,
)
from model_zoo.layers.quantized_gemm.hopper.multiply import converted
from model_zoo.layers.quantized_gemm.hopper.scales import (
    HEIGHT,
    elements,
    of_rows,
    prefetch,
    zero_points,
)

GROUPS = gl.constexpr(2)  # warpgroups that compute, of HEIGHT rows of W each
BITS = gl.constexpr(4)
CHUNK = gl.constexpr(256)  # columns of W that are loaded at once: rows of 128 bytes
BLOCKS = gl.constexpr(2)  # of 128 columns in a chunk, whose scales lie together
PART = gl.constexpr(128)  # rows of x whose y is stored at once, and the most of a tile in parts


@gluon.jit
def _place(c, k_chunks, parts, m_tiles, n_tiles, band):
    """-> (row, column of the tile, chunk of the tile's columns) of the program's chunk number c.

    k_chunks: of a part
    """
    part = gl.program_id(0) + c // k_chunks * gl.num_programs(0)
    m, n = tile_coords(part // parts, m_tiles, n_tiles, band)
    return m, n, part % parts * k_chunks + c % k_chunks


@gluon.jit
def _copy_chunk(
    w_desc, weights, w_full, w_empty, SCALES, ZEROS, c, m_tiles, n_tiles, k_chunks, parts, band, N,
    scale_blocks, PER_BLOCK: gl.constexpr,
):  # fmt: skip
    """Start the copy of the program's chunk number c, and ask for its scales to be in L2."""
    STAGES: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = GROUPS * HEIGHT
    if c >= STAGES:
        mbarrier.wait(w_empty.index(c % STAGES), (c // STAGES - 1) & 1)
    _, n, k = _place(c, k_chunks, parts, m_tiles, n_tiles, band)
    mbarrier.expect(w_full.index(c % STAGES), w_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        w_desc, [n * ROWS, k * (CHUNK * BITS // 32)], w_full.index(c % STAGES),
        weights.index(c % STAGES),
    )  # fmt: skip
    if PER_BLOCK > 0:
        prefetch(SCALES, n * ROWS, k * BLOCKS, N, scale_blocks, ROWS, BLOCKS, PER_BLOCK)
    if ZEROS is not None:
        prefetch(ZEROS, n * ROWS, k * BLOCKS, N, scale_blocks, ROWS, BLOCKS, PER_BLOCK)


@gluon.jit
def _load(
    x_desc, w_desc, rows, weights, x_full, x_empty, w_full, w_empty, SCALES, ZEROS, N, m_tiles,
    n_tiles, k_chunks, parts, band, scale_blocks, PER_BLOCK: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    DEPTH: gl.constexpr = rows.shape[2]
    STEPS: gl.constexpr = CHUNK // DEPTH
    own = gl.cdiv(m_tiles * n_tiles * parts - gl.program_id(0), gl.num_programs(0))
    count = own * k_chunks
    for c in range(gl.minimum(STAGES, count)):
        _copy_chunk(
            w_desc, weights, w_full, w_empty, SCALES, ZEROS, c, m_tiles, n_tiles, k_chunks, parts,
            band, N, scale_blocks, PER_BLOCK,
        )  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for c in range(count):
        m, _, k = _place(c, k_chunks, parts, m_tiles, n_tiles, band)
        for i in gl.static_range(STEPS):
            step = c * STEPS + i
            stage = step % X_STAGES
            if step >= X_STAGES:
                mbarrier.wait(x_empty.index(stage), (step // X_STAGES - 1) & 1)
            mbarrier.expect(x_full.index(stage), x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                x_desc, [m * x_desc.block_type.shape[0], k * CHUNK + i * DEPTH],
                x_full.index(stage), rows.index(stage),
            )  # fmt: skip
        # Not the chunk that takes the place of this one: for that x would wait.
        following = c - 1 + STAGES
        if (c > 0) & (following < count):
            _copy_chunk(
                w_desc, weights, w_full, w_empty, SCALES, ZEROS, following, m_tiles, n_tiles,
                k_chunks, parts, band, N, scale_blocks, PER_BLOCK,
            )  # fmt: skip


@gluon.jit
def _of_chunk(SCALES, row, k, N, scale_blocks, PER_BLOCK: gl.constexpr):
    """Scales, or zero points, of a group's rows from `row` on: [HEIGHT, those of a chunk]."""
    EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
    layout: gl.constexpr = columns_layout(BLOCKS * EACH, EACH)
    n = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    blocks = k * BLOCKS + 0 * n
    return of_rows(SCALES, gl.minimum(n, N - 1), blocks, N, scale_blocks, BLOCKS, EACH, 1)


@gluon.jit
def _as_words(scales, DTYPE: gl.constexpr, FACTOR: gl.constexpr):
    """Scales of the weights' type in both halves of int32, those of another as float32's bits.

    Times FACTOR, a power of two by which conversions leave codes too small.
    """
    same: gl.constexpr = scales.dtype == (gl.bfloat16 if DTYPE == "bf16" else gl.float16)
    if FACTOR != 1.0:
        scales = (scales.to(gl.float32) * FACTOR).to(scales.dtype if same else gl.float32)
    if same:
        words = (scales.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    else:
        words = scales.to(gl.float32).to(gl.int32, bitcast=True)
    return words


@gluon.jit
def _operand(
    chunk, scales, zeros, i: gl.constexpr, STEP: gl.constexpr, PTX: gl.constexpr,
    CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr, PER_BLOCK: gl.constexpr,
    FACTORS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of step i of a chunk, as operand A.  scales of int4: _as_words()."""
    if (PER_BLOCK == 0) | (FACTORS > 0):
        weights = converted(
            chunk, scales, zeros, i, STEP, STEP, PTX, CONSTRAINTS, DTYPE, BITS, FACTORS
        )
    else:
        words = step_words(chunk, i, BITS, STEP)
        layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words.type.layout))
        group: gl.constexpr = i * STEP * PER_BLOCK // 128
        scale = take(scales.reshape([HEIGHT, scales.shape[1], 1]), group).reshape([HEIGHT])
        first = gl.convert_layout(scale, layout, assert_trivial=True)[:, None, None]
        second = None
        if zeros is not None:
            first, second = zero_points(zeros, group, words, DTYPE, BITS), first
        weights = to_weights(words, first, second, PTX, CONSTRAINTS, DTYPE, BITS)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _tile_sums(
    rows, weights, x_full, x_empty, w_full, w_empty, SCALES, ZEROS, row, first, before, N, k_chunks,
    scale_blocks, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr,
    PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr, FACTOR: gl.constexpr, STEP: gl.constexpr,
    g: gl.constexpr,
):  # fmt: skip
    """Sums [HEIGHT, WIDTH] of a group's rows and k_chunks chunks from `first` on.

    before: chunks that the program has multiplied before
    """
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    DEPTH: gl.constexpr = rows.shape[2]
    SCALED: gl.constexpr = (PER_BLOCK > 0) & (FACTORS == 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    scales, zeros = None, None
    if PER_BLOCK > 0:
        scales = _of_chunk(SCALES, row, first, N, scale_blocks, PER_BLOCK)
    if ZEROS is not None:
        zeros = _of_chunk(ZEROS, row, first, N, scale_blocks, PER_BLOCK)
    for k in range(k_chunks):
        c = before + k
        following = first + gl.minimum(k + 1, k_chunks - 1)
        if PER_BLOCK > 0:
            next_scales = _of_chunk(SCALES, row, following, N, scale_blocks, PER_BLOCK)
        if ZEROS is not None:
            next_zeros = _of_chunk(ZEROS, row, following, N, scale_blocks, PER_BLOCK)
        multipliers = scales
        if SCALED:
            multipliers = _as_words(scales, DTYPE, FACTOR)
        mbarrier.wait(w_full.index(c % STAGES), (c // STAGES) & 1)
        chunk = load_chunk(weights.index(c % STAGES).slice(g * HEIGHT, HEIGHT, 0), 0)
        mbarrier.arrive(w_empty.index(c % STAGES), count=1)
        for i in gl.static_range(CHUNK // DEPTH):
            step = c * (CHUNK // DEPTH) + i
            for j in gl.static_range(DEPTH // STEP):
                a = _operand(
                    chunk, multipliers, zeros, i * (DEPTH // STEP) + j, STEP, PTX, CONSTRAINTS,
                    DTYPE, PER_BLOCK, FACTORS, layout,
                )  # fmt: skip
                if j == 0:
                    mbarrier.wait(x_full.index(step % X_STAGES), (step // X_STAGES) & 1)
                b = rows.index(step % X_STAGES).slice(j * STEP, STEP, 1).permute((1, 0))
                acc = warpgroup_mma(a, b, acc, is_async=True)
                if (j == 0) & (i > 0):  # the stage before has been multiplied
                    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                    mbarrier.arrive(x_empty.index((step - 1) % X_STAGES), count=1)
        # Operands in registers cannot be in use over the end of a loop: ptxas would let every wgmma
        # of the loop wait for the one before.
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(x_empty.index(step % X_STAGES), count=1)
        if PER_BLOCK > 0:
            scales = next_scales
        if ZEROS is not None:
            zeros = next_zeros
    return acc


@gluon.jit
def _store(y, out_desc, results, row, column):
    """y [HEIGHT, PART] of W's rows from `column` and x's from `row` on; those out of bounds are not
    stored."""
    tma.store_wait(pendings=0)  # what was stored before has been read
    results.store(y.to(out_desc.dtype).permute((1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], results)


@gluon.jit
def _finish(
    acc, out_desc, results, ROW_SCALES, BIAS, N, row, column, FACTOR: gl.constexpr
):  # fmt: skip
    """y of a group's sums; row: of y, column: of y, W's row."""
    WIDTH: gl.constexpr = acc.shape[1]
    n = gl.minimum(column + gl.arange(0, HEIGHT, gl.SliceLayout(1, acc.type.layout)), N - 1)
    if ROW_SCALES is not None:
        acc *= (gl.load(ROW_SCALES + n).to(gl.float32) * FACTOR)[:, None]
    elif FACTOR != 1.0:
        acc *= FACTOR
    if BIAS is not None:
        acc += gl.load(BIAS + n).to(gl.float32)[:, None]
    if WIDTH > PART:
        # No element changes its thread.
        halves = acc.reshape([HEIGHT, 2, WIDTH // 2]).permute((0, 2, 1))
        left, right = gl.split(halves)
        _store(left, out_desc, results, row, column)
        _store(right, out_desc, results, row + PART, column)
    else:
        _store(acc, out_desc, results, row, column)


@gluon.jit
def _add_parts(acc, PARTS, ARRIVED, slot, part, parts):
    """Store a part's sums [HEIGHT, WIDTH]; -> (the sum of all parts, True) for the last to arrive.

    slot: of the tile's rows of a group
    """
    WIDTH: gl.constexpr = acc.shape[1]
    r = gl.arange(0, HEIGHT, gl.SliceLayout(1, acc.type.layout))
    m = gl.arange(0, WIDTH, gl.SliceLayout(0, acc.type.layout))
    within = PARTS + slot.to(gl.int64) * parts * (HEIGHT * WIDTH) + r[:, None] * WIDTH + m[None, :]
    gl.store(within + part * (HEIGHT * WIDTH), acc)
    cta_barrier()
    last = gl.atomic_add(ARRIVED + slot, 1) == parts - 1
    if last:
        acc = gl.zeros_like(acc)
        for each in range(parts):
            acc += gl.load(within + each * (HEIGHT * WIDTH), cache_modifier=".cg")
        gl.store(ARRIVED + slot, 0)  # for the next GEMM
    return acc, last


@gluon.jit
def _multiply(
    rows, weights, results, x_full, x_empty, w_full, w_empty, out_desc, SCALES, ZEROS, ROW_SCALES,
    PARTS, ARRIVED, BIAS, N, m_tiles, n_tiles, k_chunks, parts, band, scale_blocks,
    PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr, PER_BLOCK: gl.constexpr,
    FACTORS: gl.constexpr, FACTOR: gl.constexpr, STEP: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its rows of each tile."""
    # Groups' scales, which are multiplied into the weights, contain the factor (_as_words).
    OF_SUMS: gl.constexpr = 1.0 if (PER_BLOCK > 0) & (FACTORS == 0) else FACTOR
    before = 0
    for i in range(gl.program_id(0), m_tiles * n_tiles * parts, gl.num_programs(0)):
        tile, part = i // parts, i % parts
        m, n = tile_coords(tile, m_tiles, n_tiles, band)
        row = (n * GROUPS + g) * HEIGHT
        acc = _tile_sums(
            rows, weights, x_full, x_empty, w_full, w_empty, SCALES, ZEROS, row, part * k_chunks,
            before, N, k_chunks, scale_blocks, PTX, CONSTRAINTS, DTYPE, PER_BLOCK, FACTORS, FACTOR,
            STEP, g,
        )  # fmt: skip
        before += k_chunks
        last = True
        if acc.shape[1] <= PART:  # noqa: SIM102 - known when it is compiled, unlike `parts`
            if parts > 1:
                acc, last = _add_parts(acc, PARTS, ARRIVED, tile * GROUPS + g, part, parts)
        if last:
            _finish(
                acc, out_desc, results.index(g), ROW_SCALES, BIAS, N, m * acc.shape[1], row, OF_SUMS
            )
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=["N", "m_tiles", "n_tiles", "k_chunks", "parts", "band", "scale_blocks"]
)
def packed_many_rows(
    x_desc, w_desc, out_desc, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED, BIAS, N, m_tiles, n_tiles,
    k_chunks, parts, band, scale_blocks, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, PER_BLOCK: gl.constexpr, FACTORS: gl.constexpr, FACTOR: gl.constexpr,
    STEP: gl.constexpr, SWIZZLE: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """PTX, ..., FACTORS: as of skinny_hopper.py.

    FACTOR    a power of two by which conversions leave weights too small

    k_chunks  of a part
    STEP      columns that are multiplied at once, of one group of scales
    STAGES, X_STAGES  of the rings of W and x
    """
    WIDTH: gl.constexpr = x_desc.block_type.shape[0]
    weights = gl.allocate_shared_memory(
        gl.int32, [STAGES, GROUPS * HEIGHT, CHUNK * BITS // 32], gl.NVMMASharedLayout(128, 32, 2)
    )
    rows = gl.allocate_shared_memory(
        x_desc.dtype,
        [X_STAGES, WIDTH, x_desc.block_type.shape[1]],
        gl.NVMMASharedLayout(SWIZZLE, 16, 2),
    )
    results = gl.allocate_shared_memory(
        out_desc.dtype, [GROUPS, out_desc.block_type.shape[0], HEIGHT],
        gl.NVMMASharedLayout(128, 16, 2),
    )  # fmt: skip
    w_full, w_empty = stage_barriers(STAGES)
    x_full, x_empty = stage_barriers(X_STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                rows, weights, results, x_full, x_empty, w_full, w_empty, out_desc, SCALES, ZEROS,
                ROW_SCALES, PARTS, ARRIVED, BIAS, N, m_tiles, n_tiles, k_chunks, parts, band,
                scale_blocks, PTX, CONSTRAINTS, DTYPE, PER_BLOCK, FACTORS, FACTOR, STEP, 0,
            )),
            (_multiply, (
                rows, weights, results, x_full, x_empty, w_full, w_empty, out_desc, SCALES, ZEROS,
                ROW_SCALES, PARTS, ARRIVED, BIAS, N, m_tiles, n_tiles, k_chunks, parts, band,
                scale_blocks, PTX, CONSTRAINTS, DTYPE, PER_BLOCK, FACTORS, FACTOR, STEP, 1,
            )),
            (_load, (
                x_desc, w_desc, rows, weights, x_full, x_empty, w_full, w_empty, SCALES, ZEROS, N,
                m_tiles, n_tiles, k_chunks, parts, band, scale_blocks, PER_BLOCK, DEPENDENT,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
