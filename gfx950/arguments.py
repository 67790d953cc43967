"""What a kernel takes, in Triton's words, and what it is given: types, checks, and the bytes of the kernarg segment."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gfx950.findings import CodeObjectError
from gfx950.memory import is_tensor, unwrap

_POINTED = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2fnuz": "fp8e5b16",
    "bool": "u1",
    **{f"{u}int{bits}": f"{'u' if u else 'i'}{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)},
}
_FLOATS = {"fp16": "<e", "fp32": "<f", "fp64": "<d"}
NOTHING = "constexpr"  # the type of an argument that is None: it is compiled in, and no longer passed


@dataclass(frozen=True)
class Argument:
    """One kernel argument: its place in the kernarg segment, and what it is in the metadata's words.

    type: what it is in Triton's ("*bf16", "i32", "fp32"), empty where nobody said.
    """

    name: str
    offset: int
    size: int
    kind: str  # .value_kind: "global_buffer", "by_value", "hidden_…"
    type: str = ""

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


def type_of(argument: object, name: str) -> str:
    """Triton's type for an argument, as its launcher has it. Raises CodeObjectError for what is none."""
    value = unwrap(argument)
    if value is None:
        return NOTHING
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _POINTED:
            raise CodeObjectError(f"{name} holds {dtype}, which Triton has no pointer for")
        return "*" + _POINTED[dtype]
    if isinstance(value, (bool, np.bool_)):
        return "u1"
    if isinstance(value, (int, np.integer)):
        if not -(2**63) <= value < 2**64:
            raise CodeObjectError(f"{name} = {value} does not fit in 64 bits")
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, (float, np.floating)):
        return "fp32"
    raise CodeObjectError(f"{name} is {_called(value)}; expected a tensor, an int or a float")


def _called(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def completed(kernel: str, names: Sequence[str], defaults: Mapping[str, object], args: Sequence) -> dict[str, object]:
    """The arguments by name, with defaults where the last ones are left out.

    names: of the parameters that are no constexpr, in order. Raises CodeObjectError for too few or too many.
    """
    left_out = names[len(args) :]
    if len(args) > len(names) or not set(left_out) <= set(defaults):
        raise CodeObjectError(f"{kernel} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
    return dict(zip(names, args, strict=False)) | {name: defaults[name] for name in left_out}


def check_type(name: str, given: object, wanted: str) -> None:
    """Raises CodeObjectError unless Triton's launcher would pass such an argument to code compiled for `wanted`.

    An int passes for a float, and any int for any integer that has room for it (`pack` looks).
    """
    found = type_of(given, name)
    if not wanted or found == wanted or (found.lstrip("*k") == wanted.lstrip("*k") and "*" in found and "*" in wanted):
        return
    scalars = "*" not in found + wanted and NOTHING not in (found, wanted)
    if scalars and (_is_float(wanted) or not _is_float(found)):
        return
    value = unwrap(given)
    shown = f"a tensor of {value.dtype}" if is_tensor(value) else repr(value)
    raise CodeObjectError(f"{name} was compiled as {wanted}, got {shown}: compile the kernel for what it is given")


def _is_float(kind: str) -> bool:
    return kind.startswith(("fp", "bf"))


def pack(value: object, wanted: Argument) -> bytes:
    """The bytes of an argument: an address, or a number in the kernel's type.

    Where nothing says what that type is, a float goes into 4 or 8 bytes as a float, an int as an integer. Raises
    CodeObjectError for a number that does not fit.
    """
    name, size = wanted.name, wanted.size
    if wanted.kind == "global_buffer":
        return struct.pack("<Q", value)
    integral = isinstance(value, (bool, int, np.integer, np.bool_))
    kind = wanted.type or ("" if integral else {4: "fp32", 8: "fp64"}.get(size, ""))
    if not _is_float(kind):
        if not integral:
            raise CodeObjectError(f"{name} is an integer of {size} bytes; expected an int, got {value!r}")
        return _integer_bytes(int(value), name, size, kind)
    value = float(value)
    try:
        if kind == "bf16":  # cut off, not rounded, by Triton's launcher
            return struct.pack("<f", value)[2:]
        return struct.pack(_FLOATS[kind], value)
    except OverflowError as error:
        raise CodeObjectError(f"{name} = {value!r} does not fit in the kernel's {kind}") from error


def _integer_bytes(value: int, name: str, size: int, kind: str) -> bytes:
    bits = 8 * size
    low, high = {
        "u1": (0, 2),
        "i1": (0, 2),
        "": (-(2 ** (bits - 1)), 2**bits),
    }.get(kind) or ((0, 2**bits) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1)))
    if not low <= value < high:
        raise CodeObjectError(f"{name} = {value} does not fit in the {kind or f'{size} bytes'} that the kernel takes")
    return (value % 2**bits).to_bytes(size, "little")
