"""Unit kernels in Triton, compiled for gfx950 and run by the interpreter: each one is about one kind of instruction.

What they compute is said in torch by test_gfx950.py, which also holds the cases. X, Y, … name a kernel's constexprs.
"""

# ruff: noqa: N803, N806 (a Triton constexpr is written in capitals)

import triton
import triton.language as tl

# ---- Products ----


@triton.jit
def product(
    a_ptr,
    b_ptr,
    c_ptr,
    k_total,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
):
    """c = a @ b over k_total in steps of K; A_T and B_T: the operand lies transposed in memory."""
    rows, columns, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_strides = (1, M) if A_T else (k_total, 1)
    b_strides = (1, k_total) if B_T else (N, 1)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k_total, K):
        a = tl.load(a_ptr + rows[:, None] * a_strides[0] + (start + ks)[None, :] * a_strides[1])
        b = tl.load(b_ptr + (start + ks)[:, None] * b_strides[0] + columns[None, :] * b_strides[1])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


@triton.jit
def scaled_product(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    c_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    B_T: tl.constexpr,
    STEPS: tl.constexpr,
):
    """c = (a × its scales) @ (b × its scales): an E8M0 scale for 32 of k, bf16 has none; b is (k, N); B_T: (N, k)."""
    A_PACK: tl.constexpr = 2 if A_FORMAT == "e2m1" else 1
    B_PACK: tl.constexpr = 2 if B_FORMAT == "e2m1" else 1
    rows, columns, blocks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    a_ks, b_ks = tl.arange(0, K // A_PACK), tl.arange(0, K // B_PACK)
    b_strides = (1, STEPS * K // B_PACK) if B_T else (N, 1)
    total = tl.zeros([M, N], tl.float32)
    for step in range(STEPS):
        a = tl.load(a_ptr + rows[:, None] * (STEPS * K // A_PACK) + (step * K // A_PACK + a_ks)[None, :])
        b = tl.load(b_ptr + (step * K // B_PACK + b_ks)[:, None] * b_strides[0] + columns[None, :] * b_strides[1])
        at = (step * K // 32 + blocks)[None, :]
        b_scale = tl.load(b_scale_ptr + columns[:, None] * (STEPS * K // 32) + at)
        if A_FORMAT == "bf16":
            total = tl.dot_scaled(a, None, A_FORMAT, b, b_scale, B_FORMAT, total)
        else:
            a_scale = tl.load(a_scale_ptr + rows[:, None] * (STEPS * K // 32) + at)
            total = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, total)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


@triton.jit
def scaled_product_packed_along_n(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """As scaled_product with a in e4m3, but b's e2m1 codes lie in pairs along N."""
    rows, columns, ks, blocks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    a = tl.load(a_ptr + rows[:, None] * K + ks[None, :])
    b = tl.load(b_ptr + ks[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :])
    a_scale = tl.load(a_scale_ptr + rows[:, None] * (K // 32) + blocks[None, :])
    b_scale = tl.load(b_scale_ptr + columns[:, None] * (K // 32) + blocks[None, :])
    c = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e2m1", rhs_k_pack=False)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], c)


@triton.jit
def chained_products(q_ptr, k_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """c = bf16(q @ k.T) @ k, k loaded once: an operand that comes from a product, and one used plain and transposed."""
    rows, columns, ds = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + ds[None, :])
    k = tl.load(k_ptr + columns[:, None] * D + ds[None, :])
    scores = tl.dot(q, k.T)
    c = tl.dot(scores.to(tl.bfloat16), k)
    tl.store(c_ptr + rows[:, None] * D + ds[None, :], c)


# ---- Casts ----


@triton.jit
def cast(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def to_fp4(x_ptr, codes_ptr, scale, BLOCK: tl.constexpr):
    """Two floats, divided by scale, to a byte of two e2m1 codes, by the instruction: Triton has no e2m1 tensors."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.load(x_ptr + 2 * at), tl.load(x_ptr + 2 * at + 1)
    codes = tl.inline_asm_elementwise(
        "v_mov_b32 $0, 0\nv_cvt_scalef32_pk_fp4_f32 $0, $1, $2, $3",
        "=&v,v,v,v",
        [low, high, scale],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    tl.store(codes_ptr + at, codes.to(tl.uint8))


@triton.jit
def from_fp4(codes_ptr, bf16_ptr, f16_ptr, f32_ptr, scale, BLOCK: tl.constexpr):
    """Bytes of two e2m1 codes, times scale, in the three formats that have an instruction for it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + at).to(tl.int32)
    bf16 = tl.inline_asm_elementwise(
        "v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2", "=v,v,v", [codes, scale], dtype=tl.int32, is_pure=True, pack=1
    )
    f16 = tl.inline_asm_elementwise(
        "v_cvt_scalef32_pk_f16_fp4 $0, $1, $2", "=v,v,v", [codes, scale], dtype=tl.int32, is_pure=True, pack=1
    )
    f32 = tl.inline_asm_elementwise(
        "v_cvt_scalef32_pk_f32_fp4 $0, $1, $2", "=v,v,v", [codes, scale], dtype=tl.int64, is_pure=True, pack=1
    )
    tl.store(bf16_ptr + at, bf16)
    tl.store(f16_ptr + at, f16)
    tl.store(f32_ptr + at, f32)


# ---- Reductions, scans, sorting, shapes ----


@triton.jit
def row_reductions(x_ptr, values_ptr, indices_ptr, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """values: max, min, sum of each row of n; indices: argmax, argmin, the leftmost of equals."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at, inside = rows[:, None] * n + columns[None, :], (columns < n)[None, :]
    low, high = tl.load(x_ptr + at, inside, float("-inf")), tl.load(x_ptr + at, inside, float("inf"))
    tl.store(values_ptr + rows, tl.max(low, 1))
    tl.store(values_ptr + ROWS + rows, tl.min(high, 1))
    tl.store(values_ptr + 2 * ROWS + rows, tl.sum(tl.where(inside, low, 0.0), 1))
    tl.store(indices_ptr + rows, tl.argmax(low, 1))
    tl.store(indices_ptr + ROWS + rows, tl.argmin(high, 1))


@triton.jit
def column_reductions(x_ptr, sum_ptr, max_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(sum_ptr + columns, tl.sum(x, 0))
    tl.store(max_ptr + columns, tl.max(x, 0))


@triton.jit
def _affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scans(x_ptr, sums_ptr, backward_ptr, a_ptr, b_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Running sums from the left and from the right, and a running composition of affine maps (not commutative)."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(sums_ptr + at, tl.cumsum(x, 1))
    tl.store(backward_ptr + at, tl.cumsum(x, 1, reverse=True))
    a, b = tl.associative_scan((x * 2 + 1, x), 1, _affine)
    tl.store(a_ptr + at, a)
    tl.store(b_ptr + at, b)


@triton.jit
def sort_rows(x_ptr, up_ptr, down_ptr, flipped_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(up_ptr + at, tl.sort(x))
    tl.store(down_ptr + at, tl.sort(x, descending=True))
    tl.store(flipped_ptr + at, tl.flip(x, 1))


@triton.jit
def histogram(x_ptr, counts_ptr, N: tl.constexpr, BINS: tl.constexpr):
    counts = tl.histogram(tl.load(x_ptr + tl.arange(0, N)), BINS)
    tl.store(counts_ptr + tl.arange(0, BINS), counts)


@triton.jit
def reshapes(
    x_ptr, t_ptr, permuted_ptr, joined_ptr, halves_ptr, interleaved_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    x = tl.load(x_ptr + at)
    tl.store(t_ptr + columns[:, None] * ROWS + rows[None, :], tl.trans(x))
    flat = tl.arange(0, ROWS * COLUMNS)
    permuted = tl.permute(tl.reshape(x, [ROWS, 4, COLUMNS // 4]), [1, 2, 0])
    tl.store(permuted_ptr + flat, tl.reshape(permuted, [ROWS * COLUMNS]))
    low, high = tl.split(tl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    half = rows[:, None] * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    tl.store(halves_ptr + half, low)
    tl.store(halves_ptr + ROWS * COLUMNS // 2 + half, high)
    tl.store(joined_ptr + flat, tl.reshape(tl.join(low, high), [ROWS * COLUMNS]))
    tl.store(interleaved_ptr + at, tl.interleave(high, low))


@triton.jit
def gather(x_ptr, index_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + at, tl.gather(tl.load(x_ptr + at), tl.load(index_ptr + at), AXIS))


# ---- Arithmetic ----


@triton.jit
def float_function(x_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if OP == "exp2":
        y = tl.exp2(x)
    elif OP == "exp":
        y = tl.exp(x)
    elif OP == "log2":
        y = tl.log2(x)
    elif OP == "log":
        y = tl.log(x)
    elif OP == "sqrt":
        y = tl.sqrt(x)
    elif OP == "sqrt_rn":
        y = tl.sqrt_rn(x)
    elif OP == "rsqrt":
        y = tl.rsqrt(x)
    elif OP == "floor":
        y = tl.floor(x)
    elif OP == "ceil":
        y = tl.ceil(x)
    elif OP == "sin":
        y = tl.sin(x)
    else:
        tl.static_assert(OP == "erf")
        y = tl.erf(x)
    tl.store(y_ptr + at, y)


@triton.jit
def divide(x_ptr, y_ptr, fast_ptr, exact_ptr, fma_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(fast_ptr + at, x / y)
    tl.store(exact_ptr + at, tl.div_rn(x, y))
    tl.store(fma_ptr + at, tl.fma(x, y, x))


@triton.jit
def integer_functions(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The thirteen functions that test_gfx950.INTEGER_FUNCTIONS names, in its order, n apart; y is nowhere 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    shift = (y & (BITS - 1)).to(x.dtype)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + n + at, x - y)
    tl.store(out_ptr + 2 * n + at, x * y)
    tl.store(out_ptr + 3 * n + at, x << shift)
    tl.store(out_ptr + 4 * n + at, x >> shift)
    tl.store(out_ptr + 5 * n + at, x & y)
    tl.store(out_ptr + 6 * n + at, x | ~y)
    tl.store(out_ptr + 7 * n + at, x ^ y)
    tl.store(out_ptr + 8 * n + at, tl.minimum(x, y))
    tl.store(out_ptr + 9 * n + at, tl.maximum(x, y))
    tl.store(out_ptr + 10 * n + at, tl.where(x < y, x, -y))
    tl.store(out_ptr + 11 * n + at, x // y)
    tl.store(out_ptr + 12 * n + at, x % y)


@triton.jit
def high_products(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.umulhi(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def number_casts(
    f32_ptr, i32_ptr, i64_ptr, i8_ptr, to_i32_ptr, to_f32_ptr, from_i64_ptr, widened_ptr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    tl.store(to_i32_ptr + at, tl.load(f32_ptr + at).to(tl.int32))
    tl.store(to_f32_ptr + at, tl.load(i32_ptr + at).to(tl.float32))
    tl.store(from_i64_ptr + at, tl.load(i64_ptr + at).to(tl.float32))
    tl.store(widened_ptr + at, tl.load(i8_ptr + at).to(tl.int64))


# ---- Memory ----


@triton.jit
def copy(x_ptr, y_ptr, n, skip, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """y[skip:n] = x[skip:n]; the mask changes at multiples of RUN elements, so that a lane can move RUN at once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.max_constancy((at >= skip) & (at < n), [RUN])
    tl.store(y_ptr + at, tl.load(x_ptr + at, inside), inside)


@triton.jit
def copy_with_default(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = x with its first n, and 7 after them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < n, 7))


@triton.jit
def copy_rows(x_ptr, index_ptr, y_ptr, row_bytes_x, row_bytes_y, COLUMNS: tl.constexpr):
    """Row index[i] of x to row i of y: a scalar load, and its value in an address."""
    row = tl.load(index_ptr + tl.program_id(0))
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * row_bytes_x + columns)
    tl.store(y_ptr + tl.program_id(0) * row_bytes_y + columns, x)


@triton.jit
def far_and_back(x_ptr, y_ptr, far_ptr, far, near, BLOCK: tl.constexpr):
    """y[i] = x[far[i] × (far − near)], by way of an address far[i] × far elements away."""
    at = tl.arange(0, BLOCK)
    steps = tl.load(far_ptr + at)
    away = x_ptr + steps * far
    tl.store(y_ptr + at, tl.load(away - steps * near))


@triton.jit
def far_scalar(x_ptr, y_ptr, far_ptr, far, near, BLOCK: tl.constexpr):
    """As far_and_back with one step for the whole program, on the scalar side."""
    step = tl.load(far_ptr + tl.program_id(0))
    away = x_ptr + step * far
    block = tl.load(away - step * near + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), block)


@triton.jit
def ids(y_ptr, COUNT: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
    tl.store(y_ptr + number * COUNT + tl.arange(0, COUNT), x + y * 1000 + z * 1000000 + tl.arange(0, COUNT) * 10000000)


@triton.jit
def spilled(x_ptr, y_ptr, n, TILES: tl.constexpr, SIZE: tl.constexpr):
    """Pairs of tiles, first with last: all have to be kept, and do not fit in the registers."""
    at = tl.arange(0, SIZE)
    kept = tl.zeros([SIZE], tl.float32)
    tiles = ()
    for i in tl.static_range(TILES):
        tiles += (tl.load(x_ptr + i * n + at),)
    tl.debug_barrier()
    for i in tl.static_range(TILES):
        kept = kept * 0.5 + tiles[i] * tiles[TILES - 1 - i]
    tl.store(y_ptr + at, kept)


# ---- Loops ----


@triton.jit
def collatz(x_ptr, steps_ptr, peak_ptr):
    """One number a program: a scalar loop whose end the data decides."""
    x = tl.load(x_ptr + tl.program_id(0))
    steps, peak = 0, x
    while x != 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        peak = tl.maximum(peak, x)
        steps += 1
    tl.store(steps_ptr + tl.program_id(0), steps)
    tl.store(peak_ptr + tl.program_id(0), peak)


@triton.jit
def greatest_divisors(x_ptr, y_ptr, divisor_ptr, rounds_ptr, BLOCK: tl.constexpr):
    """Euclid on a tensor: rounds until the slowest lane is done, across all waves of the workgroup."""
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    rounds = 0
    while tl.max(y, 0) > 0:
        rest = x % tl.where(y > 0, y, 1)
        x, y = tl.where(y > 0, y, x), tl.where(y > 0, rest, 0)
        rounds += 1
    tl.store(divisor_ptr + at, x)
    tl.store(rounds_ptr, rounds)


@triton.jit
def segment_sums(x_ptr, indptr_ptr, last_ptr, sum_ptr, BLOCK: tl.constexpr):
    """A program a segment: its sum and last value. Trip counts from memory; a tensor, a scalar and a pointer carry."""
    segment = tl.program_id(0)
    start, stop = tl.load(indptr_ptr + segment), tl.load(indptr_ptr + segment + 1)
    lanes = tl.arange(0, BLOCK)
    sums, last = tl.zeros([BLOCK], tl.float32), -1.0
    pointer = x_ptr + start
    for at in range(start, stop, BLOCK):
        inside = at + lanes < stop
        x = tl.load(pointer + lanes, inside, 0.0)
        sums += x
        last = tl.sum(tl.where(at + lanes == tl.minimum(stop, at + BLOCK) - 1, x, 0.0), 0)
        pointer += BLOCK
    tl.store(sum_ptr + segment, tl.sum(sums, 0))
    tl.store(last_ptr + segment, last)


# ---- Atomics ----


@triton.jit
def atomic_bins(x_ptr, bin_ptr, out_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    """out[bin[i]] op= x[i], from all programs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, target = tl.load(x_ptr + at), out_ptr + tl.load(bin_ptr + at)
    if OP == "add":
        tl.atomic_add(target, x)
    elif OP == "max":
        tl.atomic_max(target, x)
    elif OP == "min":
        tl.atomic_min(target, x)
    elif OP == "and":
        tl.atomic_and(target, x)
    elif OP == "or":
        tl.atomic_or(target, x)
    else:
        tl.static_assert(OP == "xor")
        tl.atomic_xor(target, x)


@triton.jit
def atomic_rows(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = the sum of one row of x a program, neighbours side by side: what packed atomics are made for."""
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + at, tl.load(x_ptr + tl.program_id(0) * n + at), sem="relaxed")


@triton.jit
def tickets(counter_ptr, lane_tickets_ptr, program_tickets_ptr, BLOCK: tl.constexpr):
    """Each lane takes a number from one counter, then each program one from another."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(lane_tickets_ptr + at, tl.atomic_add(counter_ptr + tl.zeros([BLOCK], tl.int32), 1))
    tl.store(program_tickets_ptr + tl.program_id(0), tl.atomic_add(counter_ptr + 1, 1))


@triton.jit
def claim(slot_ptr, owner_ptr, seen_ptr, BLOCK: tl.constexpr):
    """Compare and swap: the first program owns a slot, all see its owner. A slot a lane, and one a program pair."""
    me = (tl.program_id(0) + 1).to(slot_ptr.dtype.element_ty)
    at = tl.arange(0, BLOCK)
    empty = tl.zeros([BLOCK], slot_ptr.dtype.element_ty)
    found = tl.atomic_cas(slot_ptr + at, empty, empty + me)
    tl.store(seen_ptr + tl.program_id(0) * BLOCK + at, tl.where(found == 0, me, found))
    mine = slot_ptr + BLOCK + tl.program_id(0) // 2
    found_scalar = tl.atomic_cas(mine, (me * 0), me)
    tl.store(owner_ptr + tl.program_id(0), tl.where(found_scalar == 0, me, found_scalar))


@triton.jit
def chain(head_ptr, next_ptr, BLOCK: tl.constexpr):
    """Exchange: every lane puts its own number at the head and keeps the one it found, which makes one chain of all."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    heads = head_ptr + tl.zeros([BLOCK], tl.int32)
    found = tl.atomic_xchg(heads, (at + 1).to(head_ptr.dtype.element_ty))
    tl.store(next_ptr + at, found)


@triton.jit
def sum_by_the_last(x_ptr, partial_ptr, counter_ptr, y_ptr, programs, BLOCK: tl.constexpr):
    """Each program's sum to a workspace; the one that finishes last adds them up and sets the counter back to 0."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + at)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(x, 0))
    tl.debug_barrier()
    finished = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if finished == programs - 1:
        inside = at < programs
        partials = tl.load(partial_ptr + at, inside, 0.0, cache_modifier=".cg")
        tl.store(y_ptr, tl.sum(partials, 0))
        tl.store(counter_ptr, 0)


# ---- MLA decode, split over the tokens ----


@triton.jit
def mla_decode(
    q_ptr,
    kv_ptr,
    kv_scale_ptr,
    indptr_ptr,
    partial_ptr,
    lse_ptr,
    sm_scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Program (b, s) attends to split s of sequence b; each cache row is read once, its first LATENT numbers value too.

    q (batch, HEADS, LATENT + ROPE) bf16; kv (tokens, LATENT + ROPE) bf16 or fp8 with one scale; partial (batch, SPLITS,
    HEADS, LATENT) float32, normalised; lse (batch, SPLITS, HEADS), base 2. TAIL says how the last tile ends.
    """
    batch, split = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = LATENT + ROPE
    start, stop = tl.load(indptr_ptr + batch), tl.load(indptr_ptr + batch + 1)
    share = tl.cdiv(tl.cdiv(stop - start, SPLITS), BLOCK_N) * BLOCK_N
    first = start + split * share
    last = tl.minimum(first + share, stop)
    limit = last + 1 if TAIL == "one too many" else last

    heads, latent, rope, tokens = tl.arange(0, HEADS), tl.arange(0, LATENT), tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    q_row = q_ptr + (batch * HEADS + heads)[:, None] * WIDTH
    q_latent = tl.load(q_row + latent[None, :])
    q_rope = tl.load(q_row + LATENT + rope[None, :])
    scale = tl.load(kv_scale_ptr)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, LATENT], tl.float32)
    for tile in range(first, last, BLOCK_N):
        inside = tile + tokens < limit
        row = kv_ptr + (tile + tokens).to(tl.int64)[:, None] * WIDTH
        if TAIL == "unmasked":
            kv_latent = tl.load(row + latent[None, :]).to(tl.bfloat16)
            kv_rope = tl.load(row + LATENT + rope[None, :]).to(tl.bfloat16)
        else:
            kv_latent = tl.load(row + latent[None, :], inside[:, None], 0.0).to(tl.bfloat16)
            kv_rope = tl.load(row + LATENT + rope[None, :], inside[:, None], 0.0).to(tl.bfloat16)
        scores = tl.dot(q_rope, kv_rope.T, tl.dot(q_latent, kv_latent.T)) * (sm_scale * scale * 1.4426950408889634)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        weight = weight * fade + tl.sum(p, 1)
        total = tl.dot(p.to(tl.bfloat16), kv_latent, total * fade[:, None])
        top = new_top
    some = weight > 0
    total = total * tl.where(some, scale / tl.where(some, weight, 1.0), 0.0)[:, None]
    out = (batch * SPLITS + split) * HEADS + heads
    tl.store(partial_ptr + out[:, None] * LATENT + latent[None, :], total)
    tl.store(lse_ptr + out, tl.where(some, top + tl.log2(tl.where(some, weight, 1.0)), float("-inf")))


@triton.jit
def mla_merge(partial_ptr, lse_ptr, out_ptr, HEADS: tl.constexpr, LATENT: tl.constexpr, SPLITS: tl.constexpr):
    """Program (b, h): the splits' outputs, weighted by their lse; zeros where no split had a token."""
    batch, head, latent = tl.program_id(0), tl.program_id(1), tl.arange(0, LATENT)
    top = float("-inf")
    for split in range(SPLITS):
        top = tl.maximum(top, tl.load(lse_ptr + (batch * SPLITS + split) * HEADS + head))
    top = tl.where(top > float("-inf"), top, 0.0)
    total, weight = tl.zeros([LATENT], tl.float32), 0.0
    for split in range(SPLITS):
        at = (batch * SPLITS + split) * HEADS + head
        share = tl.exp2(tl.load(lse_ptr + at) - top)
        total += share * tl.load(partial_ptr + at * LATENT + latent)
        weight += share
    tl.store(out_ptr + (batch * HEADS + head) * LATENT + latent, total / tl.where(weight > 0, weight, 1.0))


# ---- Mutants ----


@triton.jit
def accumulate(x_ptr, total_ptr, N: tl.constexpr):
    """total += x: whoever calls it has to have set total."""
    at = tl.arange(0, N)
    tl.store(total_ptr + at, tl.load(total_ptr + at) + tl.load(x_ptr + at))


@triton.jit
def keep_and_sum(x_ptr, kept_ptr, sum_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """kept = the first n of x, and their sum, read back from kept; without MASKED, the sum of all BLOCK of it."""
    at = tl.arange(0, BLOCK)
    tl.store(kept_ptr + at, tl.load(x_ptr + at, at < n), at < n)
    tl.debug_barrier()
    kept = tl.load(kept_ptr + at, at < n, 0.0) if MASKED else tl.load(kept_ptr + at)
    tl.store(sum_ptr, tl.sum(kept, 0))


@triton.jit
def copy_shifted(x_ptr, y_ptr, shift, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + shift + at))


@triton.jit
def shifted(x_ptr, y_ptr, n, load_shift, store_shift, atomic_shift, BLOCK: tl.constexpr):
    """The first n of x, moved by an offset of each lane, to y, and added to it."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + load_shift, at < n)
    tl.store(y_ptr + at + store_shift, x, at < n)
    tl.debug_barrier()
    tl.atomic_add(y_ptr + at + atomic_shift, x, at < n, sem="relaxed")


@triton.jit
def paged(x_ptr, page_ptr, y_ptr, n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens in pages of PAGE, each page's number in memory."""
    at = tl.arange(0, BLOCK)
    page = tl.load(page_ptr + at // PAGE, at < n)
    tl.store(y_ptr + at, tl.load(x_ptr + page * PAGE + at % PAGE, at < n), at < n)


@triton.jit
def add_in_place(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
def with_defaults(x_ptr, y_ptr, factor=2.0, addend_ptr=None, SHIFT: tl.constexpr = 3, BLOCK: tl.constexpr = 64):
    at = tl.arange(0, BLOCK)
    y = tl.load(x_ptr + at) * factor + SHIFT
    if addend_ptr is not None:
        y += tl.load(addend_ptr + at)
    tl.store(y_ptr + at, y)


@triton.jit
def numbers(y_ptr, f, i, flag, f64: tl.float64, f16: tl.float16, bf16: tl.bfloat16, i64: tl.int64, u8: tl.uint8):
    """Scalar arguments as float32, those behind `flag` in types that their annotations say."""
    tl.store(y_ptr, f * 1.0)
    tl.store(y_ptr + 1, i * 1.0)
    tl.store(y_ptr + 2, 1.0 if flag else 0.0)
    tl.store(y_ptr + 3, f64.to(tl.float32))
    tl.store(y_ptr + 4, f16.to(tl.float32))
    tl.store(y_ptr + 5, bf16.to(tl.float32))
    tl.store(y_ptr + 6, i64.to(tl.float32))
    tl.store(y_ptr + 7, u8.to(tl.float32))


@triton.jit
def asserting(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.device_assert(x < 100, "too large")
    tl.store(y_ptr + tl.arange(0, BLOCK), x)


@triton.jit
def printing(x_ptr, BLOCK: tl.constexpr):
    tl.device_print("x", tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def double_and_third(x_ptr, double_ptr, third_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(double_ptr + tl.arange(0, BLOCK), x + x)
    tl.store(third_ptr + tl.arange(0, BLOCK), x / 3.0)


@triton.jit
def transpose_through_lds(x_ptr, y_ptr, N: tl.constexpr):
    """y = x.T of an N × N matrix; the layouts of the two sides differ, so that the waves exchange all through LDS."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    tl.store(y_ptr + i[:, None] * N + i[None, :], tl.trans(x))
