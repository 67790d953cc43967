"""Runs MI355X (gfx950, CDNA4) machine code on a CPU, instruction by instruction, with the eyes of a sanitizer.

    result = gfx950.run(kernel, grid, args, constexprs={"BLOCK": 64}, num_warps=4)
    assert result.ok, result.findings

What it tells: the numbers a kernel computes, whether it stays inside its buffers, and how much it moves and does.
What it does not tell: how long it takes.
"""

from collections.abc import Callable, Mapping, Sequence

from gfx950.compiler import compile
from gfx950.counters import BufferCounters, Counters
from gfx950.findings import (
    CodeObjectError,
    Finding,
    Gfx950Error,
    KernelFaultError,
    UnknownInstructionError,
)
from gfx950.loader import CodeObject, load
from gfx950.machine import ORDERS, Machine, Result, check_grid
from gfx950.memory import Unaligned, Uninitialised

__all__ = [
    "BufferCounters",
    "CodeObject",
    "CodeObjectError",
    "Counters",
    "Finding",
    "Gfx950Error",
    "KernelFaultError",
    "Result",
    "Unaligned",
    "Uninitialised",
    "UnknownInstructionError",
    "compile",
    "load",
    "run",
]


def run(
    kernel,
    grid: int | Sequence[int],
    args: Sequence,
    *,
    constexprs: Mapping[str, object] | None = None,
    order: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **options,
) -> Result:
    """Run a kernel on a grid of workgroups; tensors among the arguments are read and modified in place.

    kernel: a CodeObject (see `load` and `compile`), or a @triton.jit function, which is compiled for these arguments
    with `constexprs` and `options` (num_warps, num_stages, …).
    grid: the number of workgroups in x, y, z.
    args: CPU torch tensors and numpy arrays (any strides; the bytes from the first to the last element are the
    buffer), ints, floats and None, in the order of the parameters; those at the end that have defaults may be left out.
    Uninitialised(tensor) makes reads of bytes that the kernel has not written a finding; Unaligned(tensor) puts it at
    an address aligned to its elements only.
    order: None for workgroups in order and each wave up to the next barrier; "reversed" for the last workgroup first;
    "shuffled" for workgroups, and waves between barriers, in an order drawn by `seed`; "lockstep" for the waves of a
    workgroup by turns, an instruction each.
    progress: called with (workgroups done, workgroups in all).

    Raises CodeObjectError for a kernel or arguments that do not fit, UnknownInstructionError for an instruction
    without semantics, KernelFaultError where the kernel can't go on. Faults of memory use are not raised: they are in
    the result's findings.
    """
    sizes = check_grid(grid)
    if not isinstance(args, (list, tuple)):
        raise CodeObjectError(f"args is a {type(args).__name__}; expected a list or tuple of the kernel's arguments")
    if order not in ORDERS:
        raise CodeObjectError(f"order is {order!r}; expected one of {ORDERS}")
    if not isinstance(seed, int) or seed < 0:
        raise CodeObjectError(f"seed is {seed!r}; expected an integer, 0 or more")
    if isinstance(kernel, CodeObject):
        if constexprs or options:
            raise CodeObjectError(f"{kernel.name} is compiled already: constexprs and options come too late")
        code = kernel
    else:
        code = compile(kernel, args, constexprs, **options)
    return Machine(code, sizes, args, seed).run(order, progress)
