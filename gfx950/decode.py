"""Machine code to instructions: tinygrad's tables for CDNA, under one shape that the semantics build on.

Operands are numbers: 0–127 scalar registers (106 VCC, 124 M0, 126 EXEC), 128–255 constants and special values,
256–511 VGPRs, 512–767 accumulation VGPRs.
"""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad.renderer.amd import decode_inst

VCC, M0, EXEC = 106, 124, 126
LITERAL, SCC, EXECZ, VCCZ = 255, 253, 252, 251
VGPR, AGPR = 256, 512
SCALED_MFMA_PREFIX = 0xD3AC  # bits 16–31 of a 16-byte scaled MFMA

# Format → class of work, for the counters; SOPP and VOP3P hold more than one.
_CLASSES = {
    "SOP": "scalar",
    "SMEM": "scalar memory",
    "VOP": "vector",
    "DS": "lds",
    "GLOBAL": "global memory",
    "FLAT": "global memory",
    "MUBUF": "global memory",
    "SCRATCH": "scratch",
}


@dataclass(frozen=True)
class Instruction:
    """One instruction at `pc` (bytes from the start of the code section)."""

    pc: int
    fields: object  # tinygrad's Inst

    @cached_property
    def name(self) -> str:
        """The mnemonic without the encoding's suffix: v_add_f32, not v_add_f32_e64."""
        return re.sub(r"_e(32|64)$", "", self.fields.op_name.lower())

    @cached_property
    def format(self) -> str:
        """VOP2, VOP1_SDWA, MUBUF, …: the encoding, literals aside."""
        return type(self.fields).__name__.removesuffix("_LIT")

    @cached_property
    def size(self) -> int:
        return self.fields.size()

    @cached_property
    def category(self) -> str:
        """The class of work it counts as."""
        name = self.name
        if "mfma" in name or "smfmac" in name:
            return "matrix"
        if name.startswith(("s_cbranch", "s_branch", "s_setpc", "s_swappc", "s_call", "s_endpgm")):
            return "branch"
        if self.format == "SOPP":
            return "barrier" if name == "s_barrier" else "wait"
        return next(work for prefix, work in _CLASSES.items() if self.format.startswith(prefix))

    @property
    def literal(self) -> int:
        return self.fields.literal

    @property
    def lds_offset(self) -> int:
        """The 16-bit offset of an LDS instruction that has one address."""
        return self.get("offset1") << 8 | self.get("offset0")

    def has(self, field: str) -> bool:
        return hasattr(type(self.fields), field)

    def get(self, field: str, default: int = 0) -> int:
        """A field that is a number or a flag; default where this encoding has none."""
        return int(getattr(self.fields, field)) if self.has(field) else default

    def operand(self, field: str) -> int:
        """The operand code in a register field."""
        value = getattr(self.fields, field)
        return value if isinstance(value, int) else value.offset

    def width(self, field: str) -> int:
        """How many registers that field names."""
        return self.fields.op_regs.get(field, 1)

    @cached_property
    def text(self) -> str:
        """The instruction as a person reads it: mnemonic and registers."""
        shown = []
        for field in ("vdst", "sdst", "sdata", "vdata", "addr", "vaddr", "srsrc", "saddr", "data", "data0", "data1"):
            if self.has(field) and (field != "data1" or "2" in self.name or "cmpst" in self.name):
                shown.append(self._show(field))
        for field in ("src0", "vsrc0", "src1", "vsrc1", "src2", "ssrc0", "ssrc1", "simm16"):
            if self.has(field) and not (field == "src0" and self.has("vsrc0")):
                shown.append(self._show(field))
        return f"{self.name} {', '.join(part for part in shown if part)}".strip()

    def _show(self, field: str) -> str:
        if field == "simm16":
            return str(self.get(field))
        code = self.operand(field)
        if code == LITERAL:
            return hex(self.literal)
        if field in ("saddr",) and code >= M0:
            return "off"
        operands = self.fields.operands
        if operands and field not in operands and field.removeprefix("v") not in operands and field != "srsrc":
            return ""
        return register_name(code, self.width(field) if field != "srsrc" else 4)


def register_name(code: int, count: int = 1) -> str:
    """v3, a[0:3], s[4:5], vcc, 1.0, … for an operand code."""
    for first, letter in ((AGPR, "a"), (VGPR, "v")):
        if code >= first:
            index = code - first
            return f"{letter}{index}" if count == 1 else f"{letter}[{index}:{index + count - 1}]"
    if code <= 101:
        return f"s{code}" if count == 1 else f"s[{code}:{code + count - 1}]"
    if 128 <= code <= 208:
        return str(code - 128 if code <= 192 else 192 - code)
    names = {VCC: "vcc", VCC + 1: "vcc_hi", M0: "m0", EXEC: "exec", EXEC + 1: "exec_hi", SCC: "scc"}
    floats = {240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0"}
    return names.get(code) or floats.get(code) or f"src{code}"


@lru_cache(maxsize=65536)
def _decode(raw: bytes) -> object:
    return decode_inst(raw, "cdna")


def decode(code: bytes, pc: int) -> Instruction:
    """The instruction at byte `pc` of a code section. Raises ValueError where there is none.

    No instruction but the scaled MFMA is longer than 8 bytes. tinygrad 0.14 takes any 8-byte instruction before a
    plain f8f6f4 MFMA for a scaled one, so it is shown 16 bytes only where their prefix stands.
    """
    scaled = int.from_bytes(code[pc + 2 : pc + 4], "little") == SCALED_MFMA_PREFIX
    raw = code[pc : pc + (16 if scaled else 8)]
    return Instruction(pc, _decode(raw))
