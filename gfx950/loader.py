"""Code objects: the ELF files that hold gfx950 kernels, as Triton and other LLVM front ends write them.

Source of the layout: LLVM, "User Guide for AMDGPU Backend", Code Object V5 (kernel descriptor, msgpack metadata).
"""

import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

import msgpack
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from gfx950.arguments import NOTHING, Argument
from gfx950.findings import CodeObjectError
from gfx950.memory import MAX_WAVES

EM_AMDGPU = 224
NT_AMDGPU_METADATA = 32
EF_AMDGPU_MACH = 0xFF
EF_AMDGPU_MACH_GFX950 = 0x4F
LDS_LIMIT = 160 * 1024
IMAGE_LIMIT = 1 << 30


@dataclass(frozen=True)
class Descriptor:
    """The 64-byte kernel descriptor, as far as a wave's start depends on it."""

    lds_size: int
    scratch_size: int  # bytes per lane
    kernarg_size: int
    entry: int  # address of the first instruction
    rsrc1: int
    rsrc2: int
    properties: int
    preload_length: int  # dwords of the kernarg segment that arrive in SGPRs
    preload_offset: int

    @property
    def mode(self) -> int:
        """The MODE register as a wave starts: rounding, denormals, clamp and IEEE bits, and overflow of fp16."""
        return (
            self.rsrc1 >> 12 & 0xFF
            | (self.rsrc1 >> 21 & 1) << 8
            | (self.rsrc1 >> 23 & 1) << 9
            | (self.rsrc1 >> 26 & 1) << 23
        )

    @classmethod
    def parse(cls, raw: bytes, address: int) -> "Descriptor":
        lds, scratch, kernarg = struct.unpack_from("<3I", raw, 0)
        (entry,) = struct.unpack_from("<q", raw, 16)
        _, rsrc1, rsrc2 = struct.unpack_from("<3I", raw, 44)
        properties, preload = struct.unpack_from("<2H", raw, 56)
        return cls(lds, scratch, kernarg, address + entry, rsrc1, rsrc2, properties, preload & 0x7F, preload >> 7)


@dataclass(frozen=True)
class CodeObject:
    """A kernel, ready to run.

    lds_size is in bytes, static and dynamic together; num_waves is how many waves of 64 lanes a workgroup has;
    image is the file as loaded, from address `base`; assembly is the compiler's listing, where there is one.
    signature has the names of what `run` takes, in order, and their types in Triton's words, where they are known;
    defaults has the values of those that may be left out.
    """

    name: str
    elf: bytes = field(repr=False)
    descriptor: Descriptor = field(repr=False)
    arguments: tuple[Argument, ...] = field(repr=False)
    metadata: dict = field(repr=False)
    text: tuple[int, int]  # address and size of the code section
    base: int
    image: bytes = field(repr=False)
    lds_size: int
    num_waves: int
    assembly: str = field(default="", repr=False)
    signature: Mapping[str, str] = field(default_factory=dict, repr=False)
    defaults: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def kernarg_size(self) -> int:
        """Bytes of the kernarg segment; hand-written code objects leave it out of the descriptor."""
        ends = [argument.offset + argument.size for argument in self.arguments]
        return max(self.descriptor.kernarg_size, self.metadata.get(".kernarg_segment_size", 0), *ends)

    @property
    def user_arguments(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if not argument.hidden)

    @cached_property
    def source_lines(self) -> dict[int, str]:
        """Address of an instruction → "file:line", from the line table; empty where there is none that can be read."""
        lines: dict[int, str] = {}
        try:
            elf = ELFFile(io.BytesIO(self.elf))
            dwarf = elf.get_dwarf_info(relocate_dwarf_sections=False) if elf.has_dwarf_info() else None
            programs = [dwarf.line_program_for_CU(unit) for unit in dwarf.iter_CUs()] if dwarf else []
            for program in programs:
                if program is not None:
                    _collect_lines(program, lines)
        except Exception:  # elftools raises many kinds for a damaged table, and a kernel runs without one
            return {}
        return lines


def _collect_lines(program, lines: dict[int, str]) -> None:
    """Spread the rows of a line program over the 4-byte steps that they cover; line 0 stands for no line."""
    version = program.header.version
    previous = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if previous is not None and previous[1]:
            lines.update(dict.fromkeys(range(previous[0], state.address, 4), previous[1]))
        files = program.header.file_entry
        index = state.file - (version < 5)
        name = files[index].name.decode() if 0 <= index < len(files) else "?"
        place = f"{name}:{state.line}" if state.line else ""
        previous = None if state.end_sequence else (state.address, place)


def load(
    elf: bytes,
    name: str | None = None,
    *,
    lds_size: int | None = None,
    signature: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
    assembly: str = "",
) -> CodeObject:
    """The kernel called `name` in a gfx950 ELF (bytes); the only one if it holds one.

    lds_size: bytes of LDS a workgroup gets at launch. The file states only the static part, and Triton asks for all
    of its LDS at launch, so without this a Triton kernel that uses LDS is refused access to it; `compile` knows.
    signature: the arguments' names, in order, and their types in Triton's words ("*bf16", "i32", "fp32"). The file
    seldom names them, and never says whether 4 bytes are an int or a float: without a signature that hangs on what is
    passed. defaults: values of arguments that may be left out.
    Raises CodeObjectError if the file is no gfx950 code object, is damaged, or holds no such kernel.
    """
    file = _open(elf)
    try:
        return _parse(file, elf, name, lds_size, signature or {}, defaults or {}, assembly)
    except CodeObjectError:
        raise
    except Exception as error:  # elftools, struct and msgpack each have their own for bytes that make no sense
        raise CodeObjectError(
            f"the code object is damaged or cut short ({type(error).__name__}: {error}); expected a whole linked ELF"
        ) from error


def _parse(
    file: ELFFile,
    elf: bytes,
    name: str | None,
    lds_size: int | None,
    signature: Mapping[str, str],
    defaults: Mapping[str, object],
    assembly: str,
) -> CodeObject:
    symbols = file.get_section_by_name(".symtab") or file.get_section_by_name(".dynsym")
    descriptors = {s.name[:-3]: s for s in symbols.iter_symbols() if s.name.endswith(".kd")} if symbols else {}
    if not descriptors:
        raise CodeObjectError("the file holds no kernel (no symbol NAME.kd); expected a linked gfx950 code object")
    if name is None and len(descriptors) > 1:
        raise CodeObjectError(f"the file holds {len(descriptors)} kernels, name one of {sorted(descriptors)}")
    name = name or next(iter(descriptors))
    if name not in descriptors:
        raise CodeObjectError(f"the file holds no kernel {name!r}, only {sorted(descriptors)}")
    base, image = _image(file)
    address = descriptors[name]["st_value"]
    descriptor = Descriptor.parse(image[address - base : address - base + 64], address)
    metadata = _metadata(file, name)
    section = file.get_section_by_name(".text")
    total_lds = descriptor.lds_size if lds_size is None else max(lds_size, descriptor.lds_size)
    if not 0 <= total_lds <= LDS_LIMIT:
        raise CodeObjectError(f"{name} asks for {total_lds} bytes of LDS, gfx950 has {LDS_LIMIT}")
    text = section["sh_addr"], section["sh_size"]
    if not 0 <= descriptor.entry - text[0] < text[1] or descriptor.entry % 4:
        raise CodeObjectError(f"{name} starts at {descriptor.entry:#x}, outside its code: the file is damaged")
    num_waves = -(-metadata[".max_flat_workgroup_size"] // 64)
    if not 1 <= num_waves <= MAX_WAVES:
        raise CodeObjectError(f"{name} asks for {num_waves} waves per workgroup, gfx950 has {MAX_WAVES} at most")
    code = CodeObject(
        name=name,
        elf=bytes(elf),
        descriptor=descriptor,
        arguments=_arguments(metadata[".args"], signature),
        metadata=metadata,
        text=text,
        base=base,
        image=image,
        lds_size=total_lds,
        num_waves=num_waves,
        assembly=assembly,
        signature=signature,
        defaults=defaults,
    )
    if 4 * (descriptor.preload_offset + descriptor.preload_length) > code.kernarg_size:
        raise CodeObjectError(f"{name} preloads more arguments than it has: the file is damaged")
    return code


def _arguments(entries: Sequence[dict], signature: Mapping[str, str]) -> tuple[Argument, ...]:
    if any(a[".offset"] < 0 or a[".size"] < 1 for a in entries):
        raise CodeObjectError("an argument's offset or size is negative: the file is damaged")
    passed = [(name, kind) for name, kind in signature.items() if kind != NOTHING]
    if len(passed) > len(entries):
        raise CodeObjectError(f"the kernel takes {len(entries)} arguments, the signature names {len(passed)}")
    return tuple(
        Argument(given or a.get(".name", f"argument {i}"), a[".offset"], a[".size"], a[".value_kind"], kind)
        for i, (a, (given, kind)) in enumerate(zip_longest(entries, passed, fillvalue=("", "")))
    )


def _open(elf: bytes) -> ELFFile:
    try:
        file = ELFFile(io.BytesIO(elf))
        machine, flags = file.header["e_machine"], file.header["e_flags"]
    except (ELFError, ConstructError) as error:
        raise CodeObjectError(f"not an ELF file ({error}); expected a gfx950 code object") from error
    if machine not in ("EM_AMDGPU", EM_AMDGPU) or flags & EF_AMDGPU_MACH != EF_AMDGPU_MACH_GFX950:
        raise CodeObjectError(
            f"an ELF file for {machine}, flags {flags:#x}; expected AMDGPU code for gfx950: compile with "
            'target=GPUTarget("hip", "gfx950", 64)'
        )
    return file


def _image(file: ELFFile) -> tuple[int, bytes]:
    """The loadable segments as one block of memory, and its first address."""
    segments = [s for s in file.iter_segments() if s["p_type"] == "PT_LOAD"]
    if not segments:
        raise CodeObjectError("the file has nothing to load; expected a linked gfx950 code object, not an .o file")
    base = min(s["p_vaddr"] for s in segments)
    size = max(s["p_vaddr"] + s["p_memsz"] for s in segments) - base
    if size > IMAGE_LIMIT:
        raise CodeObjectError(f"the file asks for {size} bytes of memory; expected a code object of some kB")
    image = bytearray(size)
    for segment in segments:
        start = segment["p_vaddr"] - base
        image[start : start + segment["p_filesz"]] = segment.data()
    return base, bytes(image)


def _metadata(file: ELFFile, name: str) -> dict:
    for section in file.iter_sections():
        if section["sh_type"] != "SHT_NOTE":
            continue
        for note in section.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                kernels = msgpack.unpackb(note["n_descdata"])["amdhsa.kernels"]
                for kernel in kernels:
                    if kernel[".name"] == name:
                        return kernel
    raise CodeObjectError(f"the file holds no metadata for {name!r}; expected an AMDGPU note (code object 3 or later)")
