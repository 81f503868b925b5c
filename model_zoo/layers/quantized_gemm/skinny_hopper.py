"""y = x W^T for few rows and quantized W on Hopper (sm_90), in Gluon.

_skinny_quantized_gemm: as gemm/skinny_hopper.py (stream-K, a load warp that fills its ring of
weights before it waits for the preceding kernel), but for what is done with a unit.
  compute   one or two warpgroups, each 64 rows of a tile: codes from shared memory to registers,
            converted there to operand A of wgmma while the previous step is multiplied
  step      128 columns, or those of a scale if these are fewer
  scales    of 32, 64 or 128 columns: products of a step have sums of their own, which are added
            times their scale in float32.  Of 16 columns (fp4): multiplied into the weights, which
            is exact.  Of a row: in the epilogue.  Those of the next unit are loaded while one is
            multiplied, from the L2 cache, into which the load warp asks for them when it asks for
            the unit
  parts     as there; each warpgroup has its own
  reads     PackedWeight; x [M, K], bf16 or fp16, rows 16-byte aligned, M <= BLOCK_M; bias [N] or
            None.  Four scales or zero points of 8 bits of a row and 128 columns, or eight, as int32
  writes    y [M, N], contiguous
  bound     memory: the codes and scales
  checked   tests/model_zoo/layers/quantized_gemm against float64, on a GPU and in an interpreter
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from model_zoo.layers.gemm.stream_k_hopper import copy, share, unfold, write_part
from model_zoo.layers.quantized_gemm.convert_hopper import (
    CHUNK_WORDS,
    columns_layout,
    load_chunk,
    step_words,
    take,
    to_operand,
)

HEIGHT = gl.constexpr(64)  # rows of a warpgroup: a tile's, or FOLD stacked column runs of it
SCALE_COLUMNS = gl.constexpr(128)  # whose scales lie together
LINE = gl.constexpr(128)  # bytes of the L2 cache that are asked for at once


@gluon.constexpr_function
def elements(packed: bool, per_block: int) -> int:
    """Of a row's scales of SCALE_COLUMNS columns; packed: four of 8 bits are one element."""
    return per_block // 4 if packed else per_block


@gluon.jit
def _prefetch(SCALES, unit, N, k_blocks, scale_blocks, BLOCK_N: gl.constexpr,
              BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr):  # fmt: skip
    """Ask for a unit's scales, or zero points, to be in the L2 cache."""
    EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
    IN_LINE: gl.constexpr = LINE * 8 // SCALES.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = max(1, BLOCK_N * EACH // IN_LINE)
    i = gl.arange(0, max(32, LINES * BLOCKS), gl.BlockedLayout([1], [32], [1], [0]))
    block = gl.minimum(unit % k_blocks * BLOCKS + i // LINES, scale_blocks - 1)
    first = unit // k_blocks * (BLOCK_N * EACH) + i % LINES * IN_LINE
    at = SCALES + block * (N * EACH) + gl.minimum(first, N * EACH - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\nmov.b32 $0, 0;", "=r,l", [at.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy_weights(
    w_desc, weights, w_full, SCALES, ZEROS, unit, stage, N, k_blocks, scale_blocks,
    BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    copy(w_desc, weights, w_full, unit // k_blocks * BLOCK_N, unit, stage, k_blocks, FOLD)
    if PER_BLOCK > 0:
        _prefetch(SCALES, unit, N, k_blocks, scale_blocks, BLOCK_N, BLOCKS, PER_BLOCK)
    if ZEROS is not None:
        _prefetch(ZEROS, unit, N, k_blocks, scale_blocks, BLOCK_N, BLOCKS, PER_BLOCK)


@gluon.jit
def _load(
    w_desc, x_desc, weights, rows, w_full, x_full, empty, SCALES, ZEROS, N, k_blocks, split_units,
    scale_blocks, BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr, FOLD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The load warp.  It fills its ring of weights before the wait."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    begin, count = share(N, k_blocks, split_units, w_desc.block_type.shape[0])
    for i in range(gl.minimum(count, STAGES)):
        _copy_weights(
            w_desc, weights, w_full, SCALES, ZEROS, begin + i, i, N, k_blocks, scale_blocks,
            BLOCKS, PER_BLOCK, FOLD,
        )  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for i in range(gl.minimum(count, X_STAGES)):
        copy(x_desc, rows, x_full, 0, begin + i, i, k_blocks, FOLD)
    for i in range(count - X_STAGES):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES) & 1)  # both rings have room
        copy(x_desc, rows, x_full, 0, begin + i + X_STAGES, i % X_STAGES, k_blocks, FOLD)
        if i + STAGES < count:
            _copy_weights(
                w_desc, weights, w_full, SCALES, ZEROS, begin + i + STAGES, stage, N, k_blocks,
                scale_blocks, BLOCKS, PER_BLOCK, FOLD,
            )  # fmt: skip


@gluon.jit
def _of_unit(
    SCALES, unit, N, k_blocks, scale_blocks, RUN_BLOCKS: gl.constexpr, PER_BLOCK: gl.constexpr,
    ROW_GROUP: gl.constexpr, FOLD: gl.constexpr, GROUPS: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """A unit's scales, or zero points, of the warpgroup's rows: [HEIGHT, scales of a row's run]."""
    EACH: gl.constexpr = elements(SCALES.dtype.element_ty == gl.int32, PER_BLOCK)
    layout: gl.constexpr = columns_layout(RUN_BLOCKS * EACH, EACH)
    r = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    c = gl.arange(0, RUN_BLOCKS * EACH, gl.SliceLayout(0, layout))[None, :]
    RUN_ROWS: gl.constexpr = HEIGHT // FOLD
    n = (unit // k_blocks * GROUPS + group) * RUN_ROWS + r % RUN_ROWS
    n = gl.minimum(n, N - 1)[:, None]
    run = unit % k_blocks * FOLD + r // RUN_ROWS
    block = gl.minimum(run[:, None] * RUN_BLOCKS + c // EACH, scale_blocks - 1)
    if ROW_GROUP > 1:
        at = n // ROW_GROUP * scale_blocks + block
    else:
        at = (block * N + n) * EACH + c % EACH
    return gl.load(SCALES + at)


@gluon.jit
def _of_step(scales, i: gl.constexpr, layout: gl.constexpr):
    """Those of a step [HEIGHT], in `layout`; bytes are int32 if four were loaded as one."""
    packed: gl.constexpr = scales.dtype == gl.int32
    place: gl.constexpr = i // 4 if packed else i
    one = take(scales.reshape([HEIGHT, scales.shape[1], 1]), place).reshape([HEIGHT])
    if packed:
        one = (one >> (i % 4 * 8)) & 0xFF
    return gl.convert_layout(one, layout, assert_trivial=True)


@gluon.jit
def _add(acc, pending, scales, i: gl.constexpr, OUTSTANDING: gl.constexpr):
    """acc + the products of step i, waited for, times their scale."""
    product = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(pending,))
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    scale = _of_step(scales, i, layout)
    if (scale.dtype == gl.uint8) | (scale.dtype == gl.int32):  # the exponent of a power of two
        scale = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    return acc + product * scale.to(gl.float32)[:, None]


@gluon.jit
def _zero_points(zeros, i: gl.constexpr, words, DTYPE: gl.constexpr, BITS: gl.constexpr):
    """Of a step, as convert_hopper.py takes them: [HEIGHT, 1, 1]."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words.type.layout))
    zero = _of_step(zeros, i, layout).to(gl.int32)
    if DTYPE == "fp16":
        zero = zero * 0x10001 + 0x64006400
    elif BITS == 4:
        zero = zero * 0x10001 + 0x43004300
    else:
        # Below the exponent of 256, whose ulp is 2, not all fit.
        exact = (zero - 128).to(gl.float32).to(gl.bfloat16)
        zero = (exact.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    return zero[:, None, None]


@gluon.jit
def _multipliers(scales, i: gl.constexpr, words, DTYPE: gl.constexpr):
    """The 8 scales of a step's 16 columns, four in a word, as to_operand takes them: two of each
    word of codes, [HEIGHT, 1, 4]."""
    four = take(scales.reshape([HEIGHT, scales.shape[1] // 2, 2]), i)
    two = gl.join(four, four >> 16).reshape([HEIGHT, 4])
    two = gl.convert_layout(two, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
    first, second = two & 0xFF, (two >> 8) & 0xFF
    if DTYPE == "fp16":
        first, second = first * 0x800080, second * 0x800080
    else:
        first, second = first * 0x100010 + 0x70007000, second * 0x100010 + 0x70007000
    return first[:, None, :], second[:, None, :]


@gluon.jit
def _multiply(
    acc, words, rows, scales, zeros, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr,
):  # fmt: skip
    """acc + a unit's product: words in shared memory [HEIGHT, words], rows [WIDTH, columns]."""
    MULTIPLIED: gl.constexpr = PER_BLOCK == 8
    SCALED: gl.constexpr = PER_BLOCK > 0 and not MULTIPLIED  # sums of products, by step
    STEP: gl.constexpr = SCALE_COLUMNS // PER_BLOCK if SCALED else SCALE_COLUMNS
    IN_CHUNK: gl.constexpr = CHUNK_WORDS * 32 // BITS // STEP
    STEPS: gl.constexpr = rows.shape[1] // STEP
    layout: gl.constexpr = acc.type.layout
    none = gl.zeros_like(acc)
    following = load_chunk(words, 0)
    for i in gl.static_range(STEPS):
        if i % IN_CHUNK == 0:
            chunk = following
        if (i % IN_CHUNK == IN_CHUNK - 1) & (i < STEPS - 1):
            # Asked for before a step is converted, which takes longer.
            following = load_chunk(words, (i + 1) // IN_CHUNK)
        step = step_words(chunk, i % IN_CHUNK, BITS, STEP)
        first, second = None, None
        if MULTIPLIED:
            first, second = _multipliers(scales, i, step, DTYPE)
        elif zeros is not None:
            first = _zero_points(zeros, i, step, DTYPE, BITS)
        a = to_operand(step, first, second, PTX, CONSTRAINTS, DTYPE, BITS, layout)
        b = rows.slice(i * STEP, STEP, 1).permute((1, 0))
        if SCALED:
            product = warpgroup_mma(a, b, none, use_acc=False, is_async=True)
            if i > 0:
                acc = _add(acc, pending, scales, i - 1, 1)  # noqa: F821
            pending = product
        else:
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    if SCALED:
        acc = _add(acc, pending, scales, STEPS - 1, 0)
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    return acc


@gluon.jit
def _compute(
    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED, OUT, BIAS, M,
    N, k_blocks, split_units, scale_blocks, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr, BITS: gl.constexpr, PER_BLOCK: gl.constexpr, ROW_GROUP: gl.constexpr,
    FACTOR: gl.constexpr, FOLD: gl.constexpr, GROUPS: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """A warpgroup: products of its rows of the units, and the epilogue of each tile."""
    STAGES: gl.constexpr = weights.shape[0]
    X_STAGES: gl.constexpr = rows.shape[0]
    RUN_BLOCKS: gl.constexpr = rows.shape[2] // SCALE_COLUMNS
    RUN_ROWS: gl.constexpr = HEIGHT // FOLD
    WIDTH: gl.constexpr = rows.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    begin, count = share(N, k_blocks, split_units, GROUPS * RUN_ROWS)
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    scales, zeros = None, None
    if PER_BLOCK > 0:
        scales = _of_unit(
            SCALES, begin, N, k_blocks, scale_blocks, RUN_BLOCKS, PER_BLOCK, ROW_GROUP, FOLD,
            GROUPS, group,
        )  # fmt: skip
    if ZEROS is not None:
        zeros = _of_unit(
            ZEROS, begin, N, k_blocks, scale_blocks, RUN_BLOCKS, PER_BLOCK, ROW_GROUP, FOLD,
            GROUPS, group,
        )  # fmt: skip
    for i in range(count):
        unit = begin + i
        block = unit % k_blocks
        stage = i % STAGES
        following = gl.minimum(unit + 1, begin + count - 1)
        if PER_BLOCK > 0:
            next_scales = _of_unit(
                SCALES, following, N, k_blocks, scale_blocks, RUN_BLOCKS, PER_BLOCK, ROW_GROUP,
                FOLD, GROUPS, group,
            )  # fmt: skip
        if ZEROS is not None:
            next_zeros = _of_unit(
                ZEROS, following, N, k_blocks, scale_blocks, RUN_BLOCKS, PER_BLOCK, ROW_GROUP,
                FOLD, GROUPS, group,
            )  # fmt: skip
        if ROW_SCALES is not None:
            r = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout)) % RUN_ROWS
            n = (unit // k_blocks * GROUPS + group) * RUN_ROWS + r
            row_scale = gl.load(ROW_SCALES + gl.minimum(n, N - 1))
        mbarrier.wait(w_full.index(stage), (i // STAGES) & 1)
        mbarrier.wait(x_full.index(i % X_STAGES), (i // X_STAGES) & 1)
        acc = _multiply(
            acc, weights.index(stage).slice(group * HEIGHT, HEIGHT, 0), rows.index(i % X_STAGES),
            scales, zeros, PTX, CONSTRAINTS, DTYPE, BITS, PER_BLOCK,
        )  # fmt: skip
        mbarrier.arrive(empty.index(stage), count=1)
        if (block == k_blocks - 1) | (i == count - 1):
            starts = i >= block  # whether the program has the tile's first unit
            slot = 2 * gl.program_id(0) + starts.to(gl.int32)
            sums = acc
            if ROW_SCALES is not None:
                sums = acc * (row_scale.to(gl.float32) * FACTOR)[:, None]
            write_part(
                unfold(sums, FOLD), starts & (block == k_blocks - 1), unit // k_blocks, slot,
                PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks, split_units, GROUPS, group,
            )  # fmt: skip
            acc = gl.zeros_like(acc)
        if PER_BLOCK > 0:
            scales = next_scales
        if ZEROS is not None:
            zeros = next_zeros


@gluon.jit(do_not_specialize=["M", "N", "k_blocks", "split_units", "scale_blocks"])
def _skinny_quantized_gemm(
    w_desc, x_desc, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED, OUT, BIAS, M, N, k_blocks,
    split_units, scale_blocks, PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, DTYPE: gl.constexpr,
    BITS: gl.constexpr, PER_BLOCK: gl.constexpr, ROW_GROUP: gl.constexpr, FACTOR: gl.constexpr,
    FOLD: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """GROUPS: warpgroups that compute; one if FOLD > 1."""
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    WIDTH: gl.constexpr = FOLD * x_desc.block_type.shape[0]
    BLOCKS: gl.constexpr = FOLD * COLUMNS // SCALE_COLUMNS  # of scales in a unit
    weights = gl.allocate_shared_memory(
        gl.int32, [STAGES, GROUPS * HEIGHT, w_desc.block_type.shape[1]],
        gl.NVMMASharedLayout(128, 32, 2),
    )  # fmt: skip
    rows = gl.allocate_shared_memory(
        x_desc.dtype, [X_STAGES, WIDTH, COLUMNS], gl.NVMMASharedLayout(SWIZZLE, 16, 2)
    )
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
    fence_async_shared()
    ASKED: gl.constexpr = PER_BLOCK if ROW_GROUP == 1 else 0  # few blocks' scales: L2 has them
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (
                    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED,
                OUT, BIAS, M, N, k_blocks, split_units, scale_blocks, PTX, CONSTRAINTS, DTYPE,
                BITS, PER_BLOCK, ROW_GROUP, FACTOR, FOLD, GROUPS, 0,
                )),
                (_load, (
                w_desc, x_desc, weights, rows, w_full, x_full, empty, SCALES, ZEROS, N, k_blocks,
                split_units, scale_blocks, BLOCKS, ASKED, FOLD, DEPENDENT,
                )),
            ],
            [1], [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED,
                OUT, BIAS, M, N, k_blocks, split_units, scale_blocks, PTX, CONSTRAINTS, DTYPE,
                BITS, PER_BLOCK, ROW_GROUP, FACTOR, FOLD, GROUPS, 0,
                )),
                (_compute, (
                    weights, rows, w_full, x_full, empty, SCALES, ZEROS, ROW_SCALES, PARTS, ARRIVED,
                OUT, BIAS, M, N, k_blocks, split_units, scale_blocks, PTX, CONSTRAINTS, DTYPE,
                BITS, PER_BLOCK, ROW_GROUP, FACTOR, FOLD, GROUPS, 1,
                )),
                (_load, (
                w_desc, x_desc, weights, rows, w_full, x_full, empty, SCALES, ZEROS, N, k_blocks,
                split_units, scale_blocks, BLOCKS, ASKED, FOLD, DEPENDENT,
                )),
            ],
            [4, 1], [REGISTERS, 40],
        )  # fmt: skip
