"""The state of one wave: 64 lanes of registers, and which of them hold a value.

A vector register that was never written may be copied and computed with, as compilers do for lanes whose result is
thrown away; what comes out is undefined too. It becomes a finding where it matters: as an address, a condition, a
matrix operand, a lane read into a scalar register, or a value stored to global memory.
"""

import numpy as np

from gfx950.decode import AGPR, EXEC, VCC, VGPR, register_name
from gfx950.findings import UNINITIALISED, Findings
from gfx950.memory import Lds, Scratch

LANES = 64
LANE = np.arange(LANES)
# Bits of the MODE register. Source: AMD, "CDNA4 Instruction Set Architecture", chapter 3.
ROUNDING = 0xF  # 0: to nearest even
KEEPS_INPUTS, KEEPS_RESULTS = 0x10, 0x20  # denormal float32 numbers; without them they are zeros
KEEPS_DENORMALS = KEEPS_INPUTS | KEEPS_RESULTS
KEEPS_OTHERS = 0xC0  # the same for float16 and float64
REGISTERS = 512  # 256 VGPRs, then 256 accumulation VGPRs


def mask_of(value: int) -> np.ndarray:
    """Bit i of a 64-bit integer as element i of a bool array."""
    return np.unpackbits(np.frombuffer(value.to_bytes(8, "little"), np.uint8), bitorder="little").view(bool)


def unsupported_mode(mode: int) -> str | None:
    """What the MODE register asks for that has no semantics here; None where there is nothing."""
    if mode & ROUNDING:
        return f"rounding other than to the nearest (MODE {mode:#x})"
    if mode & KEEPS_OTHERS != KEEPS_OTHERS:
        return f"denormal float16 and float64 numbers taken for zero (MODE {mode:#x})"
    return None


def bits_of(mask: np.ndarray) -> int:
    """A bool array of 64 as an integer, element i at bit i."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


class Wave:
    """One wave of a workgroup: a slot that successive workgroups use again.

    vgpr: uint32 (512, 64), accumulation registers from row 256. sgpr: uint32 (128,), with VCC at 106, M0 at 124 and
    EXEC at 126; `s` reads and writes it as Python integers. mask and full mirror EXEC. mode is the MODE register, whose
    first value the kernel descriptor has; flushes: whether it may ever take denormal float32 numbers for zero.
    """

    def __init__(self, index: int, findings: Findings, mode: int):
        self.index = index
        self.findings = findings
        self._first_mode = mode
        self.flushes = mode & KEEPS_DENORMALS != KEEPS_DENORMALS
        self.vgpr = np.empty((REGISTERS, LANES), np.uint32)
        self.sgpr = np.empty(128, np.uint32)
        self.s = memoryview(self.sgpr)
        self.mask = np.ones(LANES, bool)
        self.full = True
        self.scc = 0
        self.mode = mode
        self.at = 0  # index of the instruction being run
        self.called_from: int | None = None  # the pc of the last call of a function
        self.resume = 0
        self.ended = False
        self._defined = np.empty((REGISTERS, LANES), bool)
        self._whole = bytearray(REGISTERS)
        self.lds: Lds
        self.scratch: Scratch

    def reset(self, lds: Lds, scratch: Scratch, rng: np.random.Generator) -> None:
        """Ready for a new workgroup: registers hold noise, and none counts as written."""
        self.vgpr[:] = rng.integers(0, 2**32, dtype=np.uint32)
        self.sgpr[:] = rng.integers(0, 2**32, dtype=np.uint32)
        self._defined[:] = False
        self._whole[:] = bytes(REGISTERS)
        self.lds, self.scratch = lds, scratch
        self.scc, self.mode, self.resume, self.ended, self.called_from = 0, self._first_mode, 0, False, None
        self.set64(VCC, 0)
        self.set64(EXEC, 2**64 - 1)

    @property
    def write_mask(self) -> np.ndarray | None:
        """The lanes that an instruction writes: the active ones, None for all."""
        return None if self.full else self.mask

    # ---- Scalar registers ----

    def get64(self, code: int) -> int:
        return self.s[code] | self.s[code + 1] << 32

    def set32(self, code: int, value: int) -> None:
        self.s[code] = value & 0xFFFFFFFF
        if code >= EXEC:
            self._mirror_exec()

    def set64(self, code: int, value: int) -> None:
        self.s[code] = value & 0xFFFFFFFF
        self.s[code + 1] = value >> 32 & 0xFFFFFFFF
        if code >= EXEC:
            self._mirror_exec()

    def _mirror_exec(self) -> None:
        self.mask[:] = mask_of(self.get64(EXEC))
        self.full = bool(self.mask.all())

    # ---- Which vector registers hold a value ----

    def define(self, register: int, lanes: np.ndarray | None = None) -> None:
        """The active lanes of a register (those of `lanes`, where given) now hold a value."""
        if self._whole[register]:
            return
        if lanes is None and self.full:
            self._whole[register] = 1
            return
        self._defined[register] |= self.mask if lanes is None else lanes
        self._whole[register] = bool(self._defined[register].all())

    def lanes_defined(self, registers: list[int]) -> np.ndarray | None:
        """The lanes in which all these registers hold a value; None for all lanes."""
        lanes = None
        for register in registers:
            if not self._whole[register]:
                lanes = self._defined[register].copy() if lanes is None else lanes & self._defined[register]
        return lanes

    def set_defined(self, register: int, defined: np.ndarray | None, written: np.ndarray | None = None) -> None:
        """In the lanes `written` (None: the active ones) the register holds a value where `defined` says so."""
        if defined is None:
            self.define(register, written)
            return
        if self._whole[register]:
            self._defined[register] = True
        self._defined[register] = np.where(self.mask if written is None else written, defined, self._defined[register])
        self._whole[register] = bool(self._defined[register].all())

    def propagate(self, sources: list[int], destinations: list[int]) -> None:
        """The active lanes of the destinations hold a value where all sources do."""
        whole = self._whole
        for register in sources:
            if not whole[register]:
                break
        else:
            for register in destinations:
                if not whole[register]:
                    self.define(register)
            return
        defined = self.lanes_defined(sources)
        for register in destinations:
            self.set_defined(register, defined)

    def require(self, registers: list[int], use: str, lanes: np.ndarray | None = None) -> None:
        """Report registers that hold no value in an active lane (or one of `lanes`) though the result depends on it."""
        whole = self._whole
        for register in registers:
            if whole[register]:
                continue
            missing = (self.mask if lanes is None else lanes) & ~self._defined[register]
            if missing.any():
                name = register_name(register + VGPR if register < 256 else register - 256 + AGPR)
                message = f"{use} depends on {name}, which was never written"
                self.findings.report(UNINITIALISED, message, int(np.nonzero(missing)[0][0]))
                self._defined[register] |= missing
