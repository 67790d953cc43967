"""From a Triton kernel and the arguments it will get to gfx950 code, on a machine without a GPU."""

from collections.abc import Mapping, Sequence

import numpy as np

from gfx950.arguments import NOTHING, check_type, completed, type_of
from gfx950.findings import CodeObjectError
from gfx950.loader import CodeObject, load
from gfx950.memory import MAX_WAVES, Unaligned, is_marked, is_tensor, unwrap

ALIGNMENT = 16  # what Triton's launcher looks for in pointers and integers
BUFFER_LIMIT = 2**31 - 1  # bytes up to which the launcher lets the AMD back end use 32-bit buffer offsets


def compile(kernel, args: Sequence, constexprs: Mapping[str, object] | None = None, **options) -> CodeObject:
    """Compile a @triton.jit function for gfx950, specialised for these arguments as Triton's launcher would.

    args: the arguments in the order of the parameters that are no constexpr (torch tensors, numpy arrays, ints,
    floats, None); their values do not matter, only types, alignment, and divisibility of integers by 16. An integer of
    1 is not turned into a constant. constexprs: values by name. Parameters left out have their defaults. options:
    num_warps, num_stages and what else Triton takes; enable_fp_fusion is on unless they say otherwise, as in launches
    up to Triton 3.9.
    Raises CodeObjectError for a kernel or arguments that do not fit, and Triton's own errors.
    """
    _check_kernel(kernel)
    _check_warps(options.get("num_warps", 1))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    constants = _constants(kernel, dict(constexprs or {}))
    parameters = [p for p in kernel.params if p.name not in constants]
    defaults = {p.name: p.default for p in parameters if p.has_default}
    names = [p.name for p in parameters]
    given = completed(kernel.__name__, names, defaults, args)
    signature = {p.name: _type_of(p, given[p.name]) for p in parameters}
    constants |= {name: None for name, kind in signature.items() if kind == NOTHING}
    attributes = {
        (i,): found for i, p in enumerate(kernel.params) if p.name in given and (found := _attributes(given[p.name], p))
    }
    source = ASTSource(
        kernel,
        {p.name: signature.get(p.name, "constexpr") for p in kernel.params},
        {(i,): constants[p.name] for i, p in enumerate(kernel.params) if p.name in constants},
        attrs=attributes,
    )
    compiled = triton_compile(
        source, target=GPUTarget("hip", "gfx950", 64), options={"enable_fp_fusion": True} | options
    )
    return load(
        compiled.asm["hsaco"],
        compiled.metadata.name,
        lds_size=compiled.metadata.shared,
        signature=signature,
        defaults=defaults,
        assembly=compiled.asm["amdgcn"],
    )


def _check_kernel(kernel: object) -> None:
    if isinstance(kernel, CodeObject):
        raise CodeObjectError(f"{kernel.name} is compiled already")
    try:
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise CodeObjectError(f"Triton is not there to compile a kernel ({error}): pip install triton") from error
    if isinstance(kernel, JITFunction):
        return
    name, kind = getattr(kernel, "__name__", None) or repr(kernel), type(kernel).__name__
    if kind == "InterpretedFunction":
        raise CodeObjectError(f"{name} was made for Triton's interpreter: unset TRITON_INTERPRET")
    if hasattr(kernel, "fn"):
        raise CodeObjectError(
            f"{getattr(kernel.fn, '__name__', name)} is wrapped in Triton's {kind}: pass the @triton.jit function (its "
            ".fn), with one choice of constexprs and options"
        )
    raise CodeObjectError(f"{name} is a {kind}; expected a @triton.jit function or a CodeObject")


def _check_warps(count: object) -> None:
    if not isinstance(count, int) or not 1 <= count <= MAX_WAVES or count & (count - 1):
        raise CodeObjectError(f"num_warps is {count!r}; expected a power of two from 1 to {MAX_WAVES}")


def _constants(kernel, given: dict[str, object]) -> dict[str, object]:
    """The constexprs by name: what was given, and else the defaults."""
    unknown = sorted(set(given) - {p.name for p in kernel.params})
    if unknown:
        raise CodeObjectError(f"{kernel.__name__} has no parameter {', '.join(unknown)}")
    constants = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default} | given
    missing = [p.name for p in kernel.params if p.is_constexpr and p.name not in constants]
    if missing:
        raise CodeObjectError(f"{kernel.__name__} needs a value for {', '.join(missing)}: pass constexprs={{...}}")
    return constants


def _type_of(parameter, argument: object) -> str:
    """The argument's type, or the one that the kernel's own annotation says."""
    found = type_of(argument, parameter.name)
    annotated = parameter.annotation_type
    if found == NOTHING or not annotated:
        return found
    check_type(parameter.name, argument, annotated)
    return annotated


def _attributes(argument: object, parameter) -> list[list]:
    """What Triton's launcher tells the compiler of an argument's value."""
    value = unwrap(argument)
    if value is None or parameter.do_not_specialize:
        return []
    divisible = [] if parameter.do_not_specialize_on_alignment else [["tt.divisibility", ALIGNMENT]]
    if not is_tensor(value):
        integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        return divisible if integer and value % ALIGNMENT == 0 else []
    found = [] if is_marked(argument, Unaligned) else divisible
    size = value.nbytes if isinstance(value, np.ndarray) else value.untyped_storage().nbytes()
    return [*found, ["tt.pointer_range", 32]] if size <= BUFFER_LIMIT else found
