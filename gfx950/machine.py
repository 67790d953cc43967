"""The machine: a grid of workgroups, each of a few waves that share an LDS, run instruction by instruction.

Workgroups run one after the other, the waves of a workgroup one after the other from barrier to barrier. That is one of
the orders the hardware may choose. `order="shuffled"` draws another; with `order="lockstep"` the waves of a workgroup
take turns, an instruction each.
"""

import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gfx950.arguments import NOTHING, Argument, check_type, completed, pack, type_of
from gfx950.counters import BufferCounters, Counters
from gfx950.decode import Instruction, decode
from gfx950.findings import CodeObjectError, Finding, Findings, KernelFaultError, Place, UnknownInstructionError
from gfx950.loader import CodeObject
from gfx950.memory import (
    GlobalMemory,
    Lds,
    Scratch,
    Unaligned,
    Uninitialised,
    is_marked,
    is_tensor,
    spans_of,
    storage_bytes,
    storage_maps,
    unwrap,
)
from gfx950.ops import BINDERS, END, Step, load_all
from gfx950.wave import LANE, LANES, Wave, unsupported_mode

load_all()

ORDERS = (None, "shuffled", "reversed", "lockstep")
MAX_INSTRUCTIONS = 20_000_000  # between two barriers of a wave
PRELOAD_PROLOGUE = 256  # bytes of code for firmware that does not preload arguments
# Bit of the descriptor's properties → SGPRs that it puts before the arguments. Source: LLVM, AMDGPU user guide.
_USER_SGPRS = {0: 4, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 1}
HOST_CALLS_SIZE = 4096  # bytes, more than any kernel looks at before it waits
S_TRAP = 0xBF92  # the upper half of the instruction
_DISPATCH_POINTER, _KERNARG_POINTER = 1, 3


@dataclass(frozen=True)
class Result:
    """What a run left behind, besides the arguments it changed in place."""

    code: CodeObject
    findings: list[Finding]
    counters: Counters

    @property
    def ok(self) -> bool:
        return not self.findings


class Machine:
    """A kernel loaded with its arguments: what the instructions' steps refer to while they run."""

    def __init__(self, code: CodeObject, grid: tuple[int, int, int], args: Sequence, seed: int):
        if problem := unsupported_mode(code.descriptor.mode):
            raise CodeObjectError(f"{code.name} is compiled for {problem}, which gfx950 cannot do yet")
        self.code = code
        self.grid = grid
        self.rng = np.random.default_rng(seed)
        self.counters = Counters()
        self.findings = Findings(self.place)
        self.memory = GlobalMemory(self.findings)
        image = np.frombuffer(code.image, np.uint8).copy()
        loaded = self.memory.add("the code object", image, readonly=True)
        self._text = code.image[code.text[0] - code.base :][: code.text[1]]
        self.code_address = loaded.base + code.text[0] - code.base
        self._group_size = LANES * code.num_waves
        self._kernarg = self._pack_arguments(args)
        self._dispatch = self._map_dispatch_packet()
        slots = len(self._text) // 4 + 2  # code that runs past its end, by two words at most, finds nothing there
        self._instructions: list[Instruction | None] = [None] * slots
        self._following = [0] * slots
        self._hits = [0] * slots
        self._waves = [Wave(i, self.findings, code.descriptor.mode) for i in range(code.num_waves)]
        self._steps: list[list[Step | None]] = [[None] * slots for _ in self._waves]
        self._wave = self._waves[0]
        self._workgroup = (0, 0, 0)

    # ---- What the steps ask ----

    def place(self) -> Place:
        """Where the run stands."""
        inst = self._instructions[self._wave.at]
        source = self.code.source_lines.get(self.code.text[0] + inst.pc)
        return Place(inst.text, inst.pc, self._workgroup, self._wave.index, source)

    def describe(self) -> str:
        inst = self._instructions[self._wave.at]
        return f"{inst.text} at {inst.pc:#x} of {self.code.name}"

    def index_of(self, address: int) -> int:
        """The index of the instruction at an address. Raises KernelFaultError outside the code."""
        offset = address - self.code_address
        if offset % 4 or not 0 <= offset < len(self._text):
            raise KernelFaultError(f"{self.describe()} jumps to {address:#x}, outside the code")
        return offset // 4

    def branch_target(self, inst: Instruction, words: int) -> int:
        """The index of the instruction `words` after the end of this one; the end of the code for one outside it."""
        target, end = inst.pc // 4 + 1 + words, len(self._text) // 4
        return target if 0 <= target < end else end

    def executed(self) -> int:
        """Instructions executed so far: the clock of s_memtime."""
        return sum(self._hits)

    # ---- Arguments ----

    def _pack_arguments(self, args: Sequence) -> int:
        segment = bytearray(self.code.kernarg_size)
        bound = bound_arguments(self.code, args)
        addresses = iter(self._map_tensors([(a, wanted.name) for a, wanted in bound if is_tensor(unwrap(a))]))
        for given, wanted in bound:
            raw = pack(next(addresses) if is_tensor(unwrap(given)) else unwrap(given), wanted)
            segment[wanted.offset : wanted.offset + wanted.size] = raw
        for wanted in self.code.arguments:
            if wanted.hidden and (value := self._hidden(wanted.kind)) is not None:
                struct.pack_into({2: "<H", 4: "<I", 8: "<Q"}[wanted.size], segment, wanted.offset, value)
        data = np.frombuffer(bytes(segment), np.uint8)
        return self.memory.add("the kernel's arguments", data, readonly=True).base

    def _map_tensors(self, tensors: list[tuple[object, str]]) -> list[int]:
        """Map each tensor as a buffer of its own; those that overlap share their bytes, and which were written."""
        arrays = [storage_bytes(unwrap(given), name) for given, name in tensors]
        spans = spans_of(arrays)
        marked = [is_marked(given, Uninitialised) for given, _ in tensors]
        marks = [np.full(array.size, mark) for array, mark in zip(arrays, marked, strict=True)]
        written = [~never if never.any() else None for never in storage_maps(spans, marks)]
        addresses = []
        for (given, name), data, span in zip(tensors, arrays, spans, strict=True):
            shadow = written[span.storage]
            if shadow is not None:
                shadow = shadow[span.offset : span.offset + data.size]
            offset = unwrap(given).itemsize if is_marked(given, Unaligned) else 0
            addresses.append(self.memory.add(name, data, offset=offset, written=shadow, span=span).base)
        return addresses

    def _hidden(self, kind: str) -> int | None:
        if kind == "hidden_hostcall_buffer":
            return self._map_host_calls()
        values = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", self.grid, strict=True)}
        values |= {"hidden_group_size_x": self._group_size, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
        values |= {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": self.code.lds_size}
        return values.get(kind)

    def _map_host_calls(self) -> int:
        """Where a kernel leaves work for the host, and would then wait for ever: no host answers."""
        data = np.zeros(HOST_CALLS_SIZE, np.uint8)
        return self.memory.add("the buffer of host calls", data, forbidden=self._host_call).base

    def _host_call(self) -> str:
        """What a kernel wants of the host: Triton's assertions print before they trap."""
        words = np.frombuffer(self._text[: len(self._text) // 4 * 4], "<u4")
        asserts = (words >> 16 == S_TRAP).any()
        what = "it prints (tl.device_print)"
        if asserts:
            what = f"an assertion failed (tl.device_assert), or {what}"
        caller = self._wave.called_from
        line = None if caller is None else self.code.source_lines.get(self.code.text[0] + caller)
        called = f", called from {line}" if line else ""
        return f"{self.code.name} calls the host, which is not there: {what}; {self.place()}{called}"

    def _map_dispatch_packet(self) -> int:
        """The HSA kernel dispatch packet, as far as kernels read it: workgroup and grid sizes."""
        size = self._group_size
        packet = struct.pack("<HHHHHHIII", 2, 3, size, 1, 1, 0, self.grid[0] * size, *self.grid[1:])
        data = np.frombuffer(packet.ljust(64, b"\0"), np.uint8)
        return self.memory.add("the dispatch packet", data, readonly=True).base

    # ---- Running ----

    def run(self, order: str | None, progress: Callable[[int, int], None] | None) -> Result:
        x, y, z = self.grid
        total = x * y * z
        numbers: Sequence[int] = range(total)
        if order == "shuffled":
            numbers = self.rng.permutation(total)
        elif order == "reversed":
            numbers = range(total - 1, -1, -1)
        with np.errstate(all="ignore"):
            for done, number in enumerate(numbers):
                if progress:
                    progress(done, total)
                rest, i = divmod(int(number), x)
                self._run_workgroup((i, rest % y, rest // y), order)
        return self._result(total)

    def _result(self, workgroups: int) -> Result:
        counters = self.counters
        counters.workgroups = workgroups
        counters.waves = workgroups * len(self._waves)
        counters.count((inst, n) for inst, n in zip(self._instructions, self._hits, strict=True) if inst and n)
        buffers = [b for b in self.memory.buffers if b.span is not None]
        counters.buffers = [
            BufferCounters(
                b.name, b.data.size, b.bytes_read, int(b.read_map.sum()), b.bytes_written, int(b.write_map.sum())
            )
            for b in buffers
        ]
        spans = [b.span for b in buffers]
        maps = storage_maps(spans, [b.read_map for b in buffers]) + storage_maps(spans, [b.write_map for b in buffers])
        counters.global_bytes = sum(int(touched.sum()) for touched in maps)
        return Result(self.code, self.findings.list(), counters)

    def _run_workgroup(self, group: tuple[int, int, int], order: str | None) -> None:
        self._workgroup = group
        lds = Lds(self.code.lds_size, self.findings)
        for wave in self._waves:
            wave.reset(lds, Scratch(self.code.descriptor.scratch_size, self.findings), self.rng)
            self._start(wave, group)
        turn = 1 if order == "lockstep" else MAX_INSTRUCTIONS
        running = list(self._waves)
        while running:
            if order == "shuffled":
                self.rng.shuffle(running)
            self._run_to_barrier(running, turn)
            running = [wave for wave in self._waves if not wave.ended]
            lds.pass_barrier()

    def _run_to_barrier(self, waves: list[Wave], turn: int) -> None:
        """Run waves until each has reached a barrier or its end, in turns of `turn` instructions."""
        spent = 0
        while waves:
            waves = [wave for wave in waves if self._run_wave(wave, turn)]
            spent += turn
            if waves and spent >= MAX_INSTRUCTIONS:
                raise KernelFaultError(
                    f"{self.code.name}, workgroup {self._workgroup}, wave {self._wave.index}: {spent:,} instructions "
                    f"without a barrier or an end; the last one was {self.describe()}"
                )

    def _start(self, wave: Wave, group: tuple[int, int, int]) -> None:
        """Registers and first instruction as the hardware sets them up."""
        descriptor = self.code.descriptor
        at = 0
        for bit, count in _USER_SGPRS.items():
            if descriptor.properties >> bit & 1:
                if count == 2:
                    values = {_DISPATCH_POINTER: self._dispatch, _KERNARG_POINTER: self._kernarg}
                    wave.set64(at, values.get(bit, 0))
                at += count
        if descriptor.preload_length:
            start = np.array([self._kernarg + 4 * descriptor.preload_offset])
            words = self.memory.load(start, 4 * descriptor.preload_length, LANE[:1], 4).view(np.uint32)[0]
            for word in words.tolist():
                wave.set32(at, word)
                at += 1
        for axis in range(3):
            if descriptor.rsrc2 >> 7 + axis & 1:
                wave.set32(at, group[axis])
                at += 1
        wave.vgpr[0] = (LANE + wave.index * LANES).astype(np.uint32)
        wave.define(0)
        entry = descriptor.entry + (PRELOAD_PROLOGUE if descriptor.preload_length else 0)
        wave.resume = (entry - self.code.text[0]) // 4

    def _run_wave(self, wave: Wave, count: int) -> bool:
        """Run up to `count` instructions of a wave; whether it can go on, neither at a barrier nor at its end."""
        steps, following, hits = self._steps[wave.index], self._following, self._hits
        self._wave = wave
        at = wave.resume
        for _ in range(count):
            step = steps[at] or self._bind(wave, at)
            hits[at] += 1
            wave.at = at
            jump = step()
            if jump is None:
                at = following[at]
            elif jump >= 0:
                at = jump
            else:
                wave.resume = following[at]
                wave.ended = jump == END
                return False
        wave.resume = at
        return True

    def _bind(self, wave: Wave, at: int) -> Step:
        inst = self._instructions[at] or self._decode(at)
        binder = BINDERS.get(inst.name)
        where = f"{inst.text} at {inst.pc:#x} of {self.code.name}"
        if binder is None:
            raise UnknownInstructionError(f"{where}: {inst.name} has no semantics in gfx950/ops yet")
        try:
            step = binder(wave, inst, self)
        except UnknownInstructionError as error:
            raise UnknownInstructionError(f"{where}: no semantics yet for {error}") from error
        self._steps[wave.index][at] = step
        return step

    def _decode(self, at: int) -> Instruction:
        if at >= len(self._text) // 4:
            raise KernelFaultError(f"{self.code.name} jumps out of its code, or runs past its end")
        try:
            inst = decode(self._text, 4 * at)
        except ValueError as error:
            word = self._text[4 * at : 4 * at + 4][::-1].hex()
            raise UnknownInstructionError(
                f"{self.code.name} at {4 * at:#x}: 0x{word} is no CDNA instruction"
            ) from error
        self._instructions[at] = inst
        self._following[at] = at + inst.size // 4
        return inst


def bound_arguments(code: CodeObject, args: Sequence) -> list[tuple[object, Argument]]:
    """What is passed, with its place. Raises CodeObjectError unless the arguments are what the kernel takes.

    Without a signature they are as many as the kernel takes, or two less, for Triton's two hidden pointers; a pointer
    may then be an address, or None.
    """
    takes = code.user_arguments
    if code.signature:
        given = completed(code.name, list(code.signature), code.defaults, args)
        for name, kind in code.signature.items():
            check_type(name, given[name], kind)
        return list(zip((given[n] for n, kind in code.signature.items() if kind != NOTHING), takes, strict=False))
    if len(args) not in (len(takes), len(takes) - 2):
        raise CodeObjectError(
            f"{code.name} takes {len(takes)} arguments ({', '.join(a.name for a in takes)}), got {len(args)}"
        )
    for argument, wanted in zip(args, takes, strict=False):
        found, pointer = type_of(argument, wanted.name), wanted.kind == "global_buffer"
        if pointer and found.startswith(("fp", "u1")):
            raise CodeObjectError(f"{wanted.name} is a pointer; expected a tensor, an address or None")
        if not pointer and (found == NOTHING or found.startswith("*")):
            raise CodeObjectError(f"{wanted.name} is a number of {wanted.size} bytes; expected an int or a float")
    return [(0 if argument is None else argument, wanted) for argument, wanted in zip(args, takes, strict=False)]


def check_grid(grid: object) -> tuple[int, int, int]:
    """The grid as three positive integers. Raises CodeObjectError for anything else."""
    problem = CodeObjectError(f"grid is {grid!r}; expected one to three positive integers")
    try:
        sizes = [operator.index(n) for n in (grid if isinstance(grid, Sequence) else (grid,))]
    except TypeError as error:
        raise problem from error
    if not 1 <= len(sizes) <= 3 or any(n < 1 or n >= 2**31 for n in sizes):
        raise problem
    return (*sizes, 1, 1)[:3]
