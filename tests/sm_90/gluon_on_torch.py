"""Runs the Gluon kernel of sm_90 on a CPU: its own Python source, with torch in the place of Gluon.

Whole tensors are computed with, so layouts mean nothing, but for pairs in a register, which lie along the last axis.
PTX of inline assembly is evaluated instruction by instruction. Shared memory begins as NaN; loads and stores outside a
tensor raise AssertionError, as does waiting for a copy that nobody has asked for, and ending before one has come. TMA
copies land when they are asked for ("early") or when they are waited for ("late"): between the two lies everything that
a GPU may do. Asynchronous products are NaN until they are waited for. Warps run in step: barriers mean nothing here.
"""

import functools
import re
import types
from collections.abc import Callable
from types import SimpleNamespace

import torch

from sm_90 import kernel
from submission import Launch

# ---- Values ----


class Value(torch.Tensor):
    """A tensor or a scalar of a kernel."""

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        return self.view(dtype) if bitcast else torch.Tensor.to(self, dtype)


def _value(tensor: torch.Tensor | int) -> Value:
    return torch.as_tensor(tensor).as_subclass(Value)


class Pointer:
    """Addresses in one tensor, in elements."""

    def __init__(self, tensor: torch.Tensor, offsets: torch.Tensor | int = 0):
        self.tensor, self.offsets = tensor, offsets
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: torch.Tensor | int) -> "Pointer":
        return Pointer(self.tensor, self.offsets + more)

    def flat(self, offsets: torch.Tensor) -> torch.Tensor:
        assert ((offsets >= 0) & (offsets < self.tensor.numel())).all(), "outside of the tensor"
        return self.tensor.reshape(-1)


def _load(pointer: Pointer, mask: torch.Tensor | None = None, other: int = 0) -> Value:
    offsets = torch.as_tensor(pointer.offsets).long()
    if mask is None:
        return _value(pointer.flat(offsets)[offsets])
    mask = mask.expand(offsets.shape)
    safe = torch.where(mask, offsets, 0)
    return _value(torch.where(mask, pointer.flat(safe)[safe], torch.tensor(other, dtype=pointer.tensor.dtype)))


def _store(pointer: Pointer, value: torch.Tensor) -> None:
    offsets = torch.as_tensor(pointer.offsets).long().expand(value.shape)
    assert value.dtype == pointer.tensor.dtype
    assert offsets.unique().numel() == offsets.numel(), "two values for one address"
    pointer.flat(offsets)[offsets.reshape(-1)] = value.reshape(-1).as_subclass(torch.Tensor)


# ---- Shared memory, copies into it, and products ----


class Shared:
    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.shape, self.dtype = tensor, list(tensor.shape), tensor.dtype

    def index(self, at: int) -> "Shared":
        assert 0 <= int(at) < self.shape[0]
        return Shared(self.tensor[int(at)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        assert start + length <= self.shape[dim]
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.tensor.permute(order))

    def load(self, layout: object = None) -> Value:
        return _value(self.tensor.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.dtype
        assert list(value.shape) == self.shape
        self.tensor.copy_(value)


def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
    return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else 0x7F7F, dtype=dtype))


class Copies:
    """The barriers of TMA copies. A barrier's phase is over when all bytes that it expects have landed."""

    def __init__(self, late: bool):
        self.late = late
        self.phases: dict[int, int] = {}  # by the barrier's address: how many are over
        self.missing: dict[int, int] = {}
        self.waiting: dict[int, list[Callable[[], None]]] = {}

    def init(self, barrier: Shared, count: int) -> None:
        assert count == 1
        at = barrier.tensor.data_ptr()
        self.phases[at], self.missing[at], self.waiting[at] = 0, 0, []

    def expect(self, barrier: Shared, size: int) -> None:
        at = barrier.tensor.data_ptr()
        assert self.missing[at] == 0, "bytes are expected before those of the phase before have come"
        self.missing[at] = size

    def load(self, source: "Rows", at: list[int], barrier: Shared, target: Shared) -> None:
        key = barrier.tensor.data_ptr()
        block = source.block(int(at[0]), at[1])
        self.missing[key] -= block.numel() * block.element_size()
        assert self.missing[key] >= 0, "more bytes than expected"
        self.waiting[key].append(functools.partial(target.store, block))
        if not self.late:
            self._land(key)
        if self.missing[key] == 0:
            self.phases[key] += 1

    def wait(self, barrier: Shared, phase: int) -> None:
        key = barrier.tensor.data_ptr()
        assert self.missing[key] == 0, "waits for bytes that do not come"
        assert self.phases[key] % 2 != int(phase), "waits for a phase that does not end"
        self._land(key)

    def end(self) -> None:
        assert not any(self.missing.values()), "ends before all bytes have come"
        assert not any(self.waiting.values()), "ends without having waited for a copy"

    def _land(self, key: int) -> None:
        for copy in self.waiting[key]:
            copy()
        self.waiting[key].clear()


class Rows:
    """A TensorDescriptor: blocks of rows, with zeros beyond the tensor."""

    def __init__(self, descriptor: object):
        self.tensor, self.shape = descriptor.base, descriptor.block_shape
        self.layout = descriptor.layout
        rows, columns = self.shape
        self.block_type = SimpleNamespace(nbytes=rows * columns * self.tensor.element_size())

    def block(self, row: int, column: int) -> torch.Tensor:
        block = torch.zeros(self.shape, dtype=self.tensor.dtype)
        part = self.tensor[row : row + self.shape[0], column : column + self.shape[1]]
        block[: part.shape[0], : part.shape[1]] = part
        return block


def _multiply(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor) -> Value:
    assert a.dtype == b.dtype == torch.float16
    return _value(sums + a.float() @ b.float())


class Products:
    """Those of wgmma, in order."""

    def __init__(self):
        self.pending: list[Callable[[], None]] = []

    def multiply(self, a: torch.Tensor, b: Shared, sums: torch.Tensor, is_async: bool) -> Value:
        assert is_async
        result = torch.full_like(sums, torch.nan)
        self.pending.append(lambda: result.copy_(_multiply(a, b.load(), sums)))
        return result

    def wait(self, count: int, sums: list | tuple) -> Value | tuple:
        while len(self.pending) > count:
            self.pending.pop(0)()
        return sums[0] if len(sums) == 1 else tuple(sums)


# ---- Inline assembly ----


def _bits(value: torch.Tensor) -> torch.Tensor:
    """As numbers from 0 on, int64."""
    size = value.element_size()
    return value.view({2: torch.int16, 4: torch.int32}[size]).long() & ((1 << 8 * size) - 1)


def _halves(word: torch.Tensor) -> torch.Tensor:
    """The two float16 of each 32 bits, (…, 2)."""
    return torch.stack([word & 0xFFFF, word >> 16], -1).to(torch.int32).to(torch.int16).view(torch.float16)


def _word(halves: torch.Tensor) -> torch.Tensor:
    low, high = _bits(halves.contiguous()).unbind(-1)
    return low | high << 16


def _prmt(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    assert int(selector) & 0x8888 == 0, "signs are not replicated here"
    picked = [((b << 32 | a) >> 8 * int(selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Bit by bit, the bit of `table` that a, b and c name."""
    result = torch.zeros_like(a | b | c)
    for i in range(8):
        if int(table) >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result & 0xFFFFFFFF


def _fp8_pair(half: torch.Tensor) -> torch.Tensor:
    both = torch.stack([half & 0xFF, half >> 8], -1).to(torch.uint8).view(torch.float8_e4m3fn)
    return _word(both.half())


_PTX: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mul.rn.f16x2": lambda a, b: _word(_halves(a) * _halves(b)),
    "cvt.rn.f16x2.e4m3x2": _fp8_pair,
    "lg2.approx.f32": lambda a: _bits(a.to(torch.int32).view(torch.float32).log2()),
    "rcp.approx.f32": lambda a: _bits(a.to(torch.int32).view(torch.float32).reciprocal()),
}


def _assemble(
    asm: str, constraints: str, args: list, dtype: torch.dtype | tuple, is_pure: bool, pack: int
) -> Value | tuple:
    """gl.inline_asm_elementwise for 16 bits in pairs or 32 bits alone; of a pair of 32 bits, the first is passed."""
    types_out = dtype if isinstance(dtype, tuple) else (dtype,)
    shape = args[0].shape
    registers = {}
    names = iter(range(len(types_out), len(constraints.split(","))))
    for arg in args:
        bits = _bits(arg.as_subclass(torch.Tensor).contiguous())
        pairs = bits.reshape(*shape[:-1], -1, pack)
        if pack == 2 and arg.element_size() == 2:
            registers[f"${next(names)}"] = pairs[..., 0] | pairs[..., 1] << 16
        else:
            for i in range(pack):
                registers[f"${next(names)}"] = pairs[..., i]
    assert next(names, None) is None, "another number of registers than the constraints say"

    def operand(text: str) -> torch.Tensor:
        return registers[text] if text in registers else torch.tensor(int(text, 0))

    for statement in re.sub(r"^\{|\}$", "", asm).split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        result = _PTX[name](*map(operand, operands[1:]))
        if operands[0].startswith("{"):
            low, high = operands[0].strip("{}").replace(" ", "").split(",")
            registers[low], registers[high] = result & 0xFFFF, result >> 16
        else:
            registers[operands[0]] = result
    out = []
    for i, wanted in enumerate(types_out):
        word = registers[f"${i}"]
        if pack == 2:
            out.append(_value(_halves(word).reshape(shape)))
        else:
            out.append(_value(word.to(torch.int32).view(wanted).reshape(shape)))
    return tuple(out) if isinstance(dtype, tuple) else out[0]


# ---- The language ----


def _largest(x: torch.Tensor, axis: int) -> Value:
    """Of floats, NaN only where there is nothing else, as the instruction has it."""
    if not x.dtype.is_floating_point:
        return x.amax(axis)
    return torch.where(x.isnan().all(axis), torch.nan, x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis))


def _larger(a: torch.Tensor, b: torch.Tensor | int) -> Value:
    b = torch.as_tensor(b, dtype=a.dtype)
    return torch.fmax(a, b) if a.dtype.is_floating_point else torch.maximum(a, b)


def _exp2(x: torch.Tensor) -> Value:
    """As ex2.approx.ftz: no denormals."""
    result = torch.exp2(x)
    return torch.where(result < 2.0**-126, 0.0, result)


def _multiple_of(x: torch.Tensor, factor: int) -> torch.Tensor:
    assert (torch.as_tensor(x) % factor == 0).all(), f"no multiples of {factor}"
    return x


def _language(program: tuple[int, int], programs: tuple[int, int]) -> SimpleNamespace:
    layouts = (
        "BlockedLayout SliceLayout NVMMADistributedLayout DotOperandLayout NVMMASharedLayout SwizzledSharedLayout "
        "DistributedLinearLayout"
    )
    return SimpleNamespace(
        **{name: lambda *_, **__: None for name in layouts.split()},
        **{name: getattr(torch, name) for name in ("float16", "float32", "int16", "int32", "int64")},
        program_id=lambda axis: _value(torch.tensor(program[axis], dtype=torch.int32)),
        num_programs=lambda axis: programs[axis],
        arange=lambda start, end, layout=None: _value(torch.arange(start, end, dtype=torch.int32)),
        full=lambda shape, value, dtype, layout: _value(torch.full(shape, value, dtype=dtype)),
        static_range=range,
        load=_load,
        store=_store,
        allocate_shared_memory=_allocate,
        inline_asm_elementwise=_assemble,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        join=lambda a, b: torch.stack([a, b], -1),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        broadcast=torch.broadcast_tensors,
        multiple_of=_multiple_of,
        max=_largest,
        maximum=_larger,
        minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b, dtype=a.dtype)),
        sum=lambda x, axis: x.sum(axis),
        where=lambda condition, a, b: _value(torch.where(torch.as_tensor(condition), a, b)),
        exp2=_exp2,
        abs=torch.abs,
        cdiv=lambda a, b: -(-a // b),
    )


def run(launch: Launch, late: bool) -> None:
    """Carry out a launch of the Gluon kernel, one program after the other."""
    arguments = {
        name: Pointer(a) if isinstance(a, torch.Tensor) else Rows(a) if hasattr(a, "block_shape") else a
        for name, a in launch.arguments.items()
    }
    copies, products = Copies(late), Products()
    names = vars(kernel) | {
        "warpgroup_mma": products.multiply,
        "warpgroup_mma_wait": products.wait,
        "mma_v2": _multiply,
        "fence_async_shared": lambda: None,
    }
    names["mbarrier"] = SimpleNamespace(
        MBarrierLayout=lambda: None, init=copies.init, expect=copies.expect, wait=copies.wait
    )
    names["_load_block"] = copies.load
    names["_barrier"] = lambda: None
    cuda = SimpleNamespace(gdc_launch_dependents=lambda: None)
    names["tl"] = SimpleNamespace(extra=SimpleNamespace(cuda=cuda))
    for name, function in vars(kernel).items():
        if isinstance(function, kernel.gluon._runtime.GluonJITFunction):
            names[name] = types.FunctionType(function.fn.__code__, names)
    for batch in range(launch.grid[1]):
        for split in range(launch.grid[0]):
            names["gl"] = _language((split, batch), launch.grid)
            names[launch.kernel.__name__](**arguments, **launch.constants)
            copies.end()
            assert not products.pending, "ends without having waited for a product"
