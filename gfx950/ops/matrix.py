"""Matrix instructions (MFMA): which lane holds which element, in one place, and the product itself.

EXEC does not apply: all lanes take part. Products are exact and summed in float64, then rounded once to float32: the
hardware's own order of summation is not documented, so results may differ from it in the last bits.

Source: AMD, "CDNA4 Instruction Set Architecture", chapter 7 (matrix arithmetic); the layouts were checked by running
products through them.
"""

import re
from functools import cache

import ml_dtypes
import numpy as np

from gfx950.decode import VGPR, Instruction
from gfx950.findings import UnknownInstructionError
from gfx950.ops import Step, binds
from gfx950.ops.convert import DECODE, FP4_VALUES
from gfx950.ops.operands import constant_bits, row_of
from gfx950.wave import LANE, LANES, Wave

U32 = np.uint32
ALL = np.ones(LANES, bool)
_BITS = {"f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "bf8": 8, "i8": 8, "fp4": 4, "f64": 64}
_F8F6F4 = {0: "fp8", 1: "bf8", 4: "fp4"}

_PLAIN = [
    *("f32_32x32x2_f32", "f32_16x16x4_f32", "f32_32x32x8_f16", "f32_16x16x16_f16", "f32_16x16x32_f16"),
    *("f32_32x32x16_f16", "f32_32x32x8_bf16", "f32_16x16x16_bf16", "f32_16x16x32_bf16", "f32_32x32x16_bf16"),
    *("i32_32x32x16_i8", "i32_16x16x32_i8", "i32_16x16x64_i8", "i32_32x32x32_i8"),
    *(f"f32_{shape}_{a}_{b}" for shape in ("16x16x32", "32x32x16") for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
]
_SCALABLE = ["f32_16x16x128_f8f6f4", "f32_32x32x64_f8f6f4"]


def _unpack(words: np.ndarray, kind: str) -> np.ndarray:
    """Registers (r, 64) uint32 to the values that each lane holds, in order: (64, n) float64, or int64 for i8."""
    raw = np.ascontiguousarray(words.T).view(np.uint8)
    if kind in ("fp8", "bf8"):
        return DECODE[kind][raw].astype(np.float64)
    if kind == "fp4":
        return FP4_VALUES[np.stack([raw & 15, raw >> 4], -1).reshape(LANES, -1)].astype(np.float64)
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "i8": np.int8}[kind]
    return raw.view(dtype).astype(np.int64 if kind == "i8" else np.float64)


@cache
def _places(size: int, depth: int, split_runs: bool) -> tuple[np.ndarray, np.ndarray]:
    """For each lane and each value it holds: the row (of A, or column of B) and k.

    Lane = group × size + row. A group holds depth / groups consecutive k; with split_runs (8-bit operands of the
    f8f6f4 forms) two runs of half as many, half of the depth apart.
    """
    groups = LANES // size
    held = depth // groups
    group, step = (LANE // size)[:, None], np.arange(held)[None, :]
    if split_runs:
        half = held // 2
        k = group * half + step % half + (step // half) * (depth // 2)
    else:
        k = group * held + step
    return np.broadcast_to((LANE % size)[:, None], k.shape), k


@cache
def _result_places(size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each result register and lane: the row and column of the product."""
    groups = LANES // size
    register = np.arange(size * size // LANES)[:, None]
    rows = register // 4 * (4 * groups) + LANE // size * 4 + register % 4
    return rows, np.broadcast_to(LANE % size, rows.shape)


class _Operand:
    """A or B of a product: reads registers into a dense (size, depth) matrix."""

    def __init__(self, wave: Wave, inst: Instruction, field: str, size: int, depth: int, kind: str, split_runs: bool):
        code = inst.operand(field)
        is_accumulator = inst.get("acc") >> (field == "src1") & 1
        count = size * depth // LANES * _BITS[kind] // 32
        if code < VGPR:
            raise UnknownInstructionError(f"{inst.text}: a matrix operand that is no vector register")
        row = code - VGPR + 256 * is_accumulator
        self.rows = list(range(row, row + count))
        self._words = wave.vgpr[row : row + count]
        self._kind = kind
        self._row, self._k = _places(size, depth, split_runs)
        self._shape = (size, depth)

    def read(self) -> np.ndarray:
        values = _unpack(self._words, self._kind)
        dense = np.empty(self._shape, values.dtype)
        dense[self._row, self._k] = values
        return dense


def _addend(wave: Wave, inst: Instruction, count: int) -> tuple[np.ndarray, list[int]]:
    """C: registers as (count, 64) uint32, or a constant."""
    code = inst.operand("src2")
    if code >= VGPR:
        row = code - VGPR + 256 * inst.get("acc_cd")
        return wave.vgpr[row : row + count], list(range(row, row + count))
    bits = constant_bits(inst, code, "u32")
    if bits is None:
        raise UnknownInstructionError(f"{inst.text}: an accumulator in scalar registers")
    return np.full((count, LANES), bits, U32), []


def _scale_reader(wave: Wave, inst: Instruction, which: int, size: int, depth: int):
    """E8M0 scales as powers of two, (size, depth): lane group g carries those of k = 32g … 32g + 31 of its row."""
    code = inst.operand(f"scale_src{which}")
    byte = inst.get("opsel") >> which & 1 | (inst.get("opsel_hi") >> which & 1) << 1
    shift = U32(8 * byte)
    constant = constant_bits(inst, code, "u32")
    if code >= VGPR:
        row = row_of(code)
        words, rows = wave.vgpr[row], [row]
    elif constant is not None:
        words, rows = np.full(LANES, constant, U32), []
    else:
        words, rows = wave.sgpr[code : code + 1], []
    groups = LANES // size

    def read():
        codes = np.broadcast_to(words, LANES) >> shift & U32(255)
        powers = np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))
        return np.repeat(powers.reshape(groups, size).T, depth // groups, axis=1)

    return read, rows


@binds(*(f"v_mfma_{name}" for name in _PLAIN + _SCALABLE), *(f"v_mfma_scale_{name}" for name in _SCALABLE))
def _bind_mfma(wave: Wave, inst: Instruction, machine) -> Step:
    match = re.fullmatch(r"v_mfma_(scale_)?(f32|i32)_(\d+)x\d+x(\d+)_(\w+)", inst.name)
    scaled, result, size, depth, kinds = match[1], match[2], int(match[3]), int(match[4]), match[5]
    f8f6f4 = kinds == "f8f6f4"
    if f8f6f4:
        formats = [_format(inst, field) for field in ("cbsz", "blgp")]
    else:
        formats = kinds.split("_") if "_" in kinds else [kinds, kinds]
        if inst.get("cbsz") or inst.get("blgp"):
            raise UnknownInstructionError(f"{inst.text}: broadcast or negation of a matrix operand")
    first, second = (
        _Operand(wave, inst, f"src{i}", size, depth, kind, f8f6f4 and _BITS[kind] == 8)
        for i, kind in enumerate(formats)
    )
    count = size * size // LANES
    addend, addend_rows = _addend(wave, inst, count)
    row = inst.operand("vdst") - VGPR + 256 * inst.get("acc_cd")
    target = wave.vgpr[row : row + count]
    results = list(range(row, row + count))
    scales, scale_rows = [], []
    for which in (0, 1) if scaled else ():
        read, rows = _scale_reader(wave, inst, which, size, depth)
        scales.append(read)
        scale_rows += rows
    sources = [*first.rows, *second.rows, *scale_rows, *addend_rows]
    rows, columns = _result_places(size)
    dtype = np.float32 if result == "f32" else np.int32

    def step():
        wave.require(sources, "a matrix product", ALL)
        a, b = first.read(), second.read()
        if scales:
            a, b = a * scales[0](), b * scales[1]()
        total = addend.view(dtype) + (a @ b.T)[rows, columns]
        target[:] = total.astype(dtype).view(U32)
        for register in results:
            wave.define(register, ALL)

    return step


def _format(inst: Instruction, field: str) -> str:
    code = inst.get(field)
    if code not in _F8F6F4:
        raise UnknownInstructionError(f"{inst.text}: 6-bit operands (format {code})")
    return _F8F6F4[code]
