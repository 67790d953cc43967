"""Our kernel for sm_90, fp8 and mxfp4: Gluon, in whose terms layouts and barriers are explicit.

Tiles of 64 tokens come by TMA into a ring in shared memory, in blocks of 64 elements of two or four dims. They are
read from there as keys in rows and as values transposed, and made float16 in registers: nothing converted goes back.
Scores are products of wgmma, whose 64 rows are the tokens and whose columns are the heads; outputs are products of
mma with dims as rows. wgmma would take the keys as fp8, but keeps 14 bits or so of a sum of fp8 products: too few for
large logits.

mxfp4: a token's largest scale is taken out, and multiplied into its scores and its weight; what is left of each scale
is multiplied into the elements. So a block is exact down to 2^-24 of the token's largest, and then fades to zero; and
so do scales below 2^-119.

The words are the field's:

    q, k, v    query, keys, values; a tile of the cache is both k and v
    qk         scores in units of log2: q · k × sm_scale × log2 e, (64 tokens, 16 heads)
    w          log2 of what a value weighs: qk, and for mxfp4 log2 of its token's largest scale on top
    m, alpha   the running maximum of w per head, and 2^(old m − new m)
    p          2^(w − m), the weights of the values
    l          the sum of the probabilities per head: of p, for mxfp4 of p without the scales
    acc        the sum of p · v, in 8 tensors of (64 elements of a row, 16 heads)
    …_s        lies in shared memory;  …_rest  is about the 64 dims that are key only
    part       64 dims of a tile; group: the dims that are g-th in their elements (GROUPS: 2 for fp8, 4 for mxfp4)
    code       an E8M0 scale, 2^(code − 127); top: the largest of a token

Needs Triton 3.6 or later.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

constexpr = gl.constexpr
BLOCK_LAYOUT = gl.NVMMASharedLayout(128, 16)  # of a block of the cache in shared memory
# Names that changed between Triton 3.6 and 3.9.
_load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _start_tile(cache, row, blocks_s, slot, ready_s, BLOCKS: constexpr):
    """Ask for the 64 rows of the cache from `row` on; ready_s tells when they are there. Beyond a row's end, and beyond
    the cache's, there are zeros."""
    mbarrier.expect(ready_s.index(slot), BLOCKS * cache.block_type.nbytes)
    for i in gl.static_range(BLOCKS):
        _load_block(cache, [row, 64 * i], ready_s.index(slot), blocks_s.index(slot * BLOCKS + i))


@gluon.jit
def _clear_rows(block_s, left):
    """Zeros in place of the rows from `left` on: they are another sequence's, and a weight of 0 does not undo NaN."""
    LAYOUT: constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    block_s.store(gl.where((rows < left)[:, None], block_s.load(LAYOUT), 0))


@gluon.jit
def _load_query(q_ptr, batch, FIRST: constexpr, COUNT: constexpr, LAYOUT: constexpr):
    """COUNT dims of a sequence's query from FIRST on, (16, COUNT) float32."""
    heads, dims = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)), FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    return gl.load(q_ptr + batch.to(gl.int64) * (16 * 576) + heads[:, None] * 576 + dims[None, :]).to(gl.float32)


@gluon.jit
def _head_powers(q, q_rest):
    """A power of two per head that brings its largest element to 1 … 2, and what undoes it: NaN where that element is
    infinite or NaN, so that the scores are NaN."""
    LAYOUT: constexpr = gl.SliceLayout(1, q.type.layout)
    largest = gl.max(gl.abs(q_rest), 1)
    largest = gl.maximum(gl.max(gl.abs(q), 1), gl.convert_layout(largest, LAYOUT, assert_trivial=True))
    exponent = largest.to(gl.int32, bitcast=True) >> 23
    bounded = gl.minimum(gl.maximum(exponent, 1), 253)
    power = ((254 - bounded) << 23).to(gl.float32, bitcast=True)
    return power, gl.where(exponent == 255, 0x7FC00000, bounded << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store_query(q_s, q, power, GROUPS: constexpr):
    """(16, dims) times a power of two per head, as float16, every 64 dims in the order of _keys: of fp8, the dims 4j
    and 4j + 1 (see _unpack_fp8), then the others; of fp4, every fourth, four times."""
    PARTS: constexpr = q.shape[1] // 64
    q = (q * power[:, None]).to(gl.float16)
    if GROUPS == 2:
        q = gl.permute(gl.reshape(q, [16, PARTS, 16, 2, 2]), [0, 1, 3, 2, 4])
    else:
        q = gl.permute(gl.reshape(q, [16, PARTS, 16, 4]), [0, 1, 3, 2])
    q_s.store(gl.reshape(q, [16, 64 * PARTS]))


@gluon.jit
def _unpack_fp8(x, KEYS: constexpr):
    """fp8 pairs, two in a register, as two float16 tensors: of the first and second pair's values where neighbours are
    pairs of dims (KEYS); where they are tokens, of the even and the odd dims."""
    PICK: constexpr = "mov.b32 p, $2;" if KEYS else "prmt.b32 p, $2, 0, 0x3120;"
    return gl.inline_asm_elementwise(
        "{.reg .b16 h0, h1; .reg .b32 p; " + PICK + " mov.b32 {h0, h1}, p; "
        "cvt.rn.f16x2.e4m3x2 $0, h0; cvt.rn.f16x2.e4m3x2 $1, h1;}",
        "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _unpack_fp4(x, scale):
    """fp4 quads, two in a register, times scale × 2^-14, as four float16 tensors. scale: float16, or int32 with the
    same float16 in both halves. The sign of a nibble goes to the top of a byte and its size to bits 3 … 1, for two
    nibbles of each quad at once; as a float16's high byte, that is it."""
    MORE: constexpr = ",r" if scale.dtype == gl.int32 else ""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b, m, even, odd, v0, v1, v2, v3; mov.b32 m, 0x80808080; "
        "shl.b32 a, $4, 1; shl.b32 b, $4, 4; lop3.b32 even, b, a, m, 0xe4; "
        "shr.u32 a, $4, 3; lop3.b32 odd, $4, a, m, 0xe4; "
        "and.b32 v2, even, 0x8e008e00; shl.b32 a, even, 8; and.b32 v0, a, 0x8e008e00; "
        "and.b32 v3, odd, 0x8e008e00; shl.b32 b, odd, 8; and.b32 v1, b, 0x8e008e00; "
        "mul.rn.f16x2 $0, v0, $5; mul.rn.f16x2 $1, v1, $5; mul.rn.f16x2 $2, v2, $5; mul.rn.f16x2 $3, v3, $5;}",
        "=r,=r,=r,=r,r,r" + MORE, [x, scale],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _spread_scales(scales_s, KEYS: constexpr, OPERAND: constexpr):
    """(64 tokens, 2 blocks) to (64, 16) if KEYS, an operand of wgmma; else (8 blocks, 32 tokens) to (64, 32), one of
    mma: a thread reads the scales of the elements that it has."""
    KEYS_LANES: constexpr = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    VALUES_LANES: constexpr = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    if KEYS:
        LAYOUT: constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [8, 0, 0], [0, 1, 0]], KEYS_LANES, [[16, 0, 0], [32, 0, 0]], [], [64, 2, 8]
        )
        scales = gl.expand_dims(scales_s.load(gl.SliceLayout(2, LAYOUT)), 2)
        spread = gl.reshape(gl.broadcast(scales, gl.full([64, 2, 8], 0, scales.dtype, LAYOUT))[0], [64, 16])
    else:
        LAYOUT: constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [1, 0, 0], [0, 0, 8], [0, 0, 16]], VALUES_LANES, [[2, 0, 0], [4, 0, 0]], [], [8, 8, 32]
        )
        scales = gl.expand_dims(scales_s.load(gl.SliceLayout(1, LAYOUT)), 1)
        spread = gl.reshape(gl.broadcast(scales, gl.full([8, 8, 32], 0, scales.dtype, LAYOUT))[0], [64, 32])
    return gl.convert_layout(spread, OPERAND, assert_trivial=True)


@gluon.jit
def _read_part(blocks_s, block, scales_s, GROUPS: constexpr, PART: constexpr, OPERAND: constexpr):
    """Part PART of a tile whose blocks begin at `block`, the elements of 64 dims, and of mxfp4 its scales."""
    ELEMENTS: constexpr = 64 // GROUPS
    FIRST: constexpr = PART * ELEMENTS
    elements = blocks_s.index(block + FIRST // 64).slice(FIRST % 64, ELEMENTS, 1).load(OPERAND)
    if GROUPS == 2:
        return (elements,)
    else:
        return elements, _spread_scales(scales_s.slice(PART % 8 * 2, 2, 1), True, OPERAND)


@gluon.jit
def _keys(part, OPERAND: constexpr):
    """A part as _read_part gives it, unpacked: (64 tokens, 64 dims) float16; no value leaves its thread."""
    if len(part) == 1:
        first, second = _unpack_fp8(part[0], True)
        keys = gl.permute(gl.join(first, second), [0, 2, 1])
    else:
        first, second, third, fourth = _unpack_fp4(part[0], part[1])
        keys = gl.permute(gl.join(gl.join(first, second), gl.join(third, fourth)), [0, 3, 2, 1])
    return gl.convert_layout(gl.reshape(keys, [64, 64]), OPERAND)


@gluon.jit
def _scores(blocks_s, block, q_s, q_rest_s, scales_s, scales_rest_s, GROUPS: constexpr, LAYOUT: constexpr):
    """Keys times query, (64 tokens, 16 heads) float32, in two sums by turns. A part is read while the one before it is
    unpacked, and unpacked while those before it are multiplied."""
    OPERAND: constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    zeros = gl.full([64, 16], 0.0, gl.float32, LAYOUT)
    sums = (zeros, zeros)
    part = _read_part(blocks_s, block, scales_s, GROUPS, 0, OPERAND)
    for i in gl.static_range(9):
        if i < 8:
            following = _read_part(blocks_s, block, scales_s if i < 7 else scales_rest_s, GROUPS, i + 1, OPERAND)
            query_s = q_s.slice(i * 64, 64, 1)
        else:
            query_s = q_rest_s
        mine = sums[0]
        if i > 1:
            mine = warpgroup_mma_wait(1, [mine])
        mine = warpgroup_mma(_keys(part, OPERAND), query_s.permute([1, 0]), mine, is_async=True)
        sums = (sums[1], mine)
        part = following
    first, second = warpgroup_mma_wait(0, sums)
    return first + second


@gluon.jit
def _load_codes(
    scale_ptr, token, scale_row, left, FIRST: constexpr, COUNT: constexpr, ALIGN: constexpr, LAYOUT: constexpr
):
    """The E8M0 codes of COUNT blocks, from FIRST on, of the first 64 of `left` tokens; of the tokens beyond, 2^0."""
    rows, blocks = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    offsets = gl.multiple_of(rows * scale_row, ALIGN)[:, None] + (FIRST + blocks)[None, :]
    first_ptr = scale_ptr + gl.multiple_of(token * scale_row, ALIGN)
    return gl.load(first_ptr + offsets, mask=(rows < left)[:, None], other=127)


@gluon.jit
def _below(top, codes):
    """The bits of 2^(15 + codes − top) as float16; 0 where that is under 2^-14, and an fp4 × 2^-14 times it 0."""
    return gl.maximum(codes - (top - 30)[:, None], 0) << 10


@gluon.jit
def _take_out_scales(codes, codes_rest, scales_s, scales_rest_s, value_scales_s, top_s):
    """Leave a tile's largest code per token in top_s, and what is left of each scale for its keys (twice in an int32)
    and its values."""
    codes, codes_rest = codes.to(gl.int32), codes_rest.to(gl.int32)
    top = gl.convert_layout(gl.max(codes_rest, 1), gl.SliceLayout(1, codes.type.layout), assert_trivial=True)
    # 2^-95 at the least: zeros have the lowest code, which would bring l to infinity.
    top = gl.maximum(gl.maximum(gl.max(codes, 1), top), 32)
    below = _below(top, codes)
    scales_s.store(below * 0x10001)
    value_scales_s.permute([1, 0]).store(below.to(gl.int16).to(gl.float16, bitcast=True))
    top_rest = gl.convert_layout(top, gl.SliceLayout(1, codes_rest.type.layout), assert_trivial=True)
    scales_rest_s.store(_below(top_rest, codes_rest) * 0x10001)
    top_s.store(top)


@gluon.jit
def _largest_of_columns(x, largest_s):
    """The maxima of x, (64 tokens, 16 heads), over all tokens. Each warp leaves those of its tokens in largest_s (4,
    16), and each thread reads all four: one barrier."""
    LANES: constexpr = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    ALL: constexpr = gl.DistributedLinearLayout([[1, 0], [2, 0], [0, 1], [0, 8]], LANES, [[0, 0], [0, 0]], [], [4, 16])
    largest_s.store(gl.max(gl.reshape(x, [4, 16, 16]), 1))
    _barrier()
    return gl.convert_layout(gl.max(largest_s.load(ALL), 0), gl.SliceLayout(0, x.type.layout), assert_trivial=True)


@gluon.jit
def _softmax_fp8(products, left, to_log2, m, l, largest_s):
    """A tile's p, with the new m and l, and alpha. products: q · k as the matrix unit leaves it."""
    tokens = gl.arange(0, 64, gl.SliceLayout(1, products.type.layout))
    qk = gl.where((tokens < left)[:, None], products * to_log2[None, :], float("-inf"))
    new_m = gl.maximum(m, _largest_of_columns(qk, largest_s))
    alpha = gl.exp2(m - new_m)
    p = gl.exp2(qk - new_m[None, :])
    return p, new_m, l * alpha[None, :] + p, alpha


@gluon.jit
def _softmax_fp4(products, left, to_log2, m, l, largest_s, top_s, LIFT: constexpr):
    """As _softmax_fp8, with the tokens' largest scales put back; and whether m has moved, which it does only by more
    than 8: weights up to 2^8 do no harm, and acc is seldom touched. fp8's loop is no faster for it."""
    tokens = gl.arange(0, 64, gl.SliceLayout(1, products.type.layout))
    top = top_s.load(gl.SliceLayout(1, products.type.layout))
    top_scale = gl.where(top == 255, 0x7FC00000, (top - 15) << 23).to(gl.float32, bitcast=True)
    qk = products * top_scale[:, None] * to_log2[None, :]
    qk = gl.where((tokens < left)[:, None], qk, float("-inf"))
    w = qk + (top - 127).to(gl.float32)[:, None]
    new_m = gl.maximum(m, _largest_of_columns(w, largest_s))
    moved = gl.max(gl.where(new_m > m + 8, 1, 0), 0)
    new_m = gl.where(moved > 0, new_m, m)
    alpha = gl.exp2(m - new_m)
    p = gl.exp2(w - new_m[None, :])
    return p, new_m, l * alpha[None, :] + gl.exp2(qk - (new_m - LIFT)[None, :]), alpha, moved


@gluon.jit
def _rescaled(acc, alpha):
    """acc times alpha."""
    rescaled = ()
    for i in gl.static_range(8):
        rescaled = rescaled + (acc[i] * alpha,)
    return rescaled


@gluon.jit
def _accumulated(acc, blocks_s, block, p_s, value_scales_s, GROUPS: constexpr, LAYOUT: constexpr):
    """acc plus the tile's p · v; the values of 128 / GROUPS tokens are unpacked at once."""
    TOKENS: constexpr = 128 // GROUPS
    VALUES: constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    for i in gl.static_range(0, 64, TOKENS):
        p = p_s.slice(i, TOKENS).load(gl.DotOperandLayout(1, LAYOUT, 2))
        added = ()
        for j in gl.static_range(8 // GROUPS):
            elements = blocks_s.index(block + j).slice(i, TOKENS).permute([1, 0]).load(VALUES)
            if GROUPS == 2:
                values = _unpack_fp8(elements, False)
            else:
                scales_s = value_scales_s.slice(j * 8, 8).slice(i, TOKENS, 1)
                values = _unpack_fp4(elements, _spread_scales(scales_s, False, VALUES))
            for g in gl.static_range(GROUPS):
                added = added + (mma_v2(values[g], p, acc[GROUPS * j + g]),)
        acc = added
    return acc


@gluon.jit
def _approximate(OPERATION: constexpr, x):
    """lg2 or rcp, to 2^-22 or so."""
    return gl.inline_asm_elementwise(
        OPERATION + ".approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _store_dims(row_ptr, acc, FIRST: constexpr, GROUPS: constexpr, factor):
    """Write GROUPS of the acc from FIRST on, (64 elements, 16 heads) each, as the dims that the elements held."""
    if GROUPS == 2:
        dims = gl.join(acc[FIRST], acc[FIRST + 1])
    else:
        dims = gl.join(gl.join(acc[FIRST], acc[FIRST + 2]), gl.join(acc[FIRST + 1], acc[FIRST + 3]))
        dims = gl.reshape(dims, [64, 16, 4])
    LAYOUT: constexpr = dims.type.layout
    elements = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None]
    heads = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :]
    groups = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :]
    offsets = gl.expand_dims(heads * 512 + (FIRST // GROUPS * 64 + elements) * GROUPS, 2) + gl.expand_dims(groups, 1)
    factor = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    dims *= gl.expand_dims(factor[None, :], 2)
    gl.store(row_ptr + offsets, dims.to(row_ptr.dtype.element_ty))


@gluon.jit
def _wgmma_kernel(
    q_ptr,
    cache,
    scale_ptr,
    kv_indptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    sm_scale,
    scale_row,
    GROUPS: constexpr,
    STAGES: constexpr,
    SPLIT: constexpr,
    ALIGN: constexpr,
):
    """Program (s, b) attends to the s-th part of sequence b. cache: a descriptor of its rows, int16, in blocks of (64,
    64). GROUPS: 2 for fp8, 4 for mxfp4, the dims in an int16. SPLIT: it leaves a partial result and its lse, else the
    output. ALIGN divides scale_row. 4 warps."""
    BLOCKS: constexpr = 8 // GROUPS + 1  # of a tile: those of the values, and one for the 64 dims that are key only
    FP4: constexpr = GROUPS == 4
    LIFT: constexpr = 5 if FP4 else 0  # l of mxfp4 lacks the largest scales, which m has: 2^LIFT keeps it from 0
    SCORES: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])  # tokens × heads
    HEADS: constexpr = gl.SliceLayout(0, SCORES)
    ACC: constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])  # elements × heads
    QUERY: constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    QUERY_REST: constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    CODES: constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    CODES_REST: constexpr = gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0])
    UNSWIZZLED: constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    split, batch, splits = gl.program_id(0), gl.program_id(1), gl.num_programs(0)

    # The query is asked for first: behind the tiles it would arrive after them.
    start, end = gl.load(kv_indptr + batch), gl.load(kv_indptr + batch + 1)
    q = _load_query(q_ptr, batch, 0, 512, QUERY)
    q_rest = _load_query(q_ptr, batch, 512, 64, QUERY_REST)

    per_split = gl.cdiv(gl.cdiv(end - start, splits), 64) * 64
    first = start + split * per_split
    count = gl.minimum(end - first, per_split)
    blocks_s = gl.allocate_shared_memory(gl.int16, [STAGES * BLOCKS, 64, 64], cache.layout)
    ready_s = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready_s.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        if i * 64 < count:
            _start_tile(cache, first + i * 64, blocks_s, i, ready_s, BLOCKS)
    if FP4:
        token = first.to(gl.int64)
        codes = _load_codes(scale_ptr, token, scale_row, count, 0, 16, ALIGN, CODES)
        codes_rest = _load_codes(scale_ptr, token, scale_row, count, 16, 2, ALIGN, CODES_REST)

    power, undone = _head_powers(q, q_rest)
    q_s = gl.allocate_shared_memory(gl.float16, [16, 512], cache.layout)
    q_rest_s = gl.allocate_shared_memory(gl.float16, [16, 64], cache.layout)
    _store_query(q_s, q, power, GROUPS)
    _store_query(q_rest_s, q_rest, gl.convert_layout(power, gl.SliceLayout(1, QUERY_REST)), GROUPS)
    fence_async_shared()
    to_log2 = gl.convert_layout(undone, HEADS) * (sm_scale * 1.4426950408889634)
    if FP4:
        # What is left of a scale is multiplied by 2^15 and an fp4 by 2^-14: together by 2.
        cache_scale = 0.5 * 2.0**LIFT
        to_log2 *= 2.0**14  # and largest scales by as much less: scores stay in float32's range, whatever a scale is
    else:
        cache_scale = gl.load(scale_ptr)
        to_log2 *= cache_scale

    p_s = gl.allocate_shared_memory(gl.float16, [64, 16], gl.NVMMASharedLayout(32, 16))
    largest_s = gl.allocate_shared_memory(gl.float32, [4, 16], UNSWIZZLED)
    scales_s = gl.allocate_shared_memory(gl.int32, [64, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    scales_rest_s = gl.allocate_shared_memory(gl.int32, [64, 2], UNSWIZZLED)
    value_scales_s = gl.allocate_shared_memory(gl.float16, [16, 64], UNSWIZZLED)
    top_s = gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    m = gl.full([16], float("-inf"), gl.float32, HEADS)
    l = gl.full([64, 16], 0.0, gl.float32, SCORES)  # a row of tokens each, summed after the loop
    acc = ()
    for _ in gl.static_range(8):
        acc = acc + (gl.full([64, 16], 0.0, gl.float32, ACC),)
    slot = 0
    phase = 0  # of the slot's barrier
    for at in range(0, count, 64):
        left = count - at
        if FP4:
            _take_out_scales(codes, codes_rest, scales_s, scales_rest_s, value_scales_s, top_s)
            token += 64
            codes = _load_codes(scale_ptr, token, scale_row, left - 64, 0, 16, ALIGN, CODES)
            codes_rest = _load_codes(scale_ptr, token, scale_row, left - 64, 16, 2, ALIGN, CODES_REST)
        mbarrier.wait(ready_s.index(slot), phase)
        block = slot * BLOCKS
        if left < 64:
            for i in gl.static_range(BLOCKS):
                _clear_rows(blocks_s.index(block + i), left)
        _barrier()
        products = _scores(blocks_s, block, q_s, q_rest_s, scales_s, scales_rest_s, GROUPS, SCORES)
        if FP4:
            p, m, l, alpha, moved = _softmax_fp4(products, left, to_log2, m, l, largest_s, top_s, LIFT)
        else:
            p, m, l, alpha = _softmax_fp8(products, left, to_log2, m, l, largest_s)
        p_s.store(p.to(gl.float16))
        alpha = gl.convert_layout(alpha, gl.SliceLayout(0, ACC))[None, :]
        _barrier()
        if not FP4 or moved > 0:
            acc = _rescaled(acc, alpha)
        acc = _accumulated(acc, blocks_s, block, p_s, value_scales_s, GROUPS, ACC)
        _barrier()
        if at + STAGES * 64 < count:
            _start_tile(cache, first + at + STAGES * 64, blocks_s, slot, ready_s, BLOCKS)
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)

    if SPLIT:
        tl.extra.cuda.gdc_launch_dependents()
    l = gl.sum(l, 0)
    positive = gl.maximum(l, 1e-37)
    factor = gl.where(l > 0, _approximate("rcp", positive), 0.0)
    if SPLIT:
        part = batch.to(gl.int64) * splits + split
        lse = gl.where(l > 0, m - LIFT + _approximate("lg2", positive), float("-inf"))
        gl.store(lse_ptr + part * 16 + gl.arange(0, 16, HEADS), lse)
        row_ptr = partial_ptr + part * 8192
    else:
        row_ptr = out_ptr + batch.to(gl.int64) * 8192
    if FP4 or not SPLIT:  # the scale of an fp8 cache is left to the merge
        factor *= cache_scale
    for i in gl.static_range(8 // GROUPS):
        _store_dims(row_ptr, acc, GROUPS * i, GROUPS, factor)
