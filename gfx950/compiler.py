"""From a Triton kernel and the arguments it will get to gfx950 code, on a machine without a GPU."""

from collections.abc import Mapping, Sequence

import numpy as np

from gfx950.findings import CodeObjectError
from gfx950.loader import CodeObject, load
from gfx950.memory import Unaligned, is_marked, is_tensor, unwrap

ALIGNMENT = 16  # what Triton's launcher looks for in pointers and integers
BUFFER_LIMIT = 2**31 - 1  # bytes up to which the launcher lets the AMD back end use 32-bit buffer offsets

_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2fnuz": "fp8e5b16",
    "bool": "i1",
    **{f"{u}int{bits}": f"{'u' if u else 'i'}{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)},
}


def compile(kernel, args: Sequence, constexprs: Mapping[str, object] | None = None, **options) -> CodeObject:
    """Compile a @triton.jit function for gfx950, specialised for these arguments as Triton's launcher would.

    args: the arguments in the order of the parameters that are no constexpr (torch tensors, numpy arrays, ints,
    floats); their values do not matter, only types, alignment, and divisibility of integers by 16. An integer of 1 is
    not turned into a constant. constexprs: values by name. options: num_warps, num_stages and what else Triton takes;
    enable_fp_fusion is on unless they say otherwise, as in launches up to Triton 3.9.
    Raises CodeObjectError for arguments that do not fit, and Triton's own errors.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    constexprs = dict(constexprs or {})
    names = [p.name for p in kernel.params if p.name not in constexprs]
    unknown = sorted(set(constexprs) - {p.name for p in kernel.params})
    missing = [p.name for p in kernel.params if p.is_constexpr and p.name in names]
    if unknown or missing or len(names) != len(args):
        raise CodeObjectError(_mismatch(kernel.__name__, names, len(args), unknown, missing))
    kinds = dict(zip(names, (_type_of(a, n) for a, n in zip(args, names, strict=True)), strict=True))
    signature = {p.name: kinds.get(p.name, "constexpr") for p in kernel.params}
    given = dict(zip(names, args, strict=True))
    attributes = {
        (i,): found for i, p in enumerate(kernel.params) if p.name in given and (found := _attributes(given[p.name]))
    }
    source = ASTSource(
        kernel,
        signature,
        {(i,): constexprs[p.name] for i, p in enumerate(kernel.params) if p.name in constexprs},
        attrs=attributes,
    )
    compiled = triton_compile(
        source, target=GPUTarget("hip", "gfx950", 64), options={"enable_fp_fusion": True} | options
    )
    return load(
        compiled.asm["hsaco"],
        compiled.metadata.name,
        lds_size=compiled.metadata.shared,
        argument_names=names,
        assembly=compiled.asm["amdgcn"],
    )


def _mismatch(kernel: str, names: list[str], count: int, unknown: list[str], missing: list[str]) -> str:
    if unknown:
        return f"{kernel} has no parameter {', '.join(unknown)}"
    if missing:
        return f"{kernel} needs a value for {', '.join(missing)}: pass constexprs={{...}}"
    return f"{kernel} takes {len(names)} arguments ({', '.join(names)}), got {count}"


def _type_of(argument: object, name: str) -> str:
    value = unwrap(argument)
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _TYPES:
            raise CodeObjectError(f"{name} holds {dtype}, which Triton has no pointer for")
        return "*" + _TYPES[dtype]
    if isinstance(value, (bool, np.bool_)):
        return "i1"
    if isinstance(value, (int, np.integer)):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    raise CodeObjectError(f"{name} is {type(value).__name__}; expected a tensor, an int or a float")


def _attributes(argument: object) -> list[list]:
    value = unwrap(argument)
    if not is_tensor(value):
        divisible = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value % ALIGNMENT == 0
        return [["tt.divisibility", ALIGNMENT]] if divisible else []
    found = [] if is_marked(argument, Unaligned) else [["tt.divisibility", ALIGNMENT]]
    size = value.nbytes
    return [*found, ["tt.pointer_range", 32]] if size <= BUFFER_LIMIT else found
