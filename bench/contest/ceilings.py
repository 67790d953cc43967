"""What the machine allows, measured: the time of an empty launch, and the rates of copying and of reading memory."""

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from bench.contest.measurements import Ceilings
from bench.worker.timing import Clock

_BYTES = 1 << 31
_RUNS = 7
_BLOCK, _BLOCKS = 4096, 16  # int32 values per load, loads per program


@triton.jit
def _empty_kernel():
    """Does nothing."""


@triton.jit
def _read_kernel(values_ptr, sums_ptr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Program i adds up its BLOCK × BLOCKS values."""
    program = tl.program_id(0)
    sums = tl.zeros([BLOCK], tl.int32)
    first = values_ptr + program.to(tl.int64) * (BLOCK * BLOCKS)
    for i in tl.static_range(BLOCKS):
        sums += tl.load(first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(sums, 0))


def measure(clock: Clock, device: torch.device) -> Ceilings:
    """The medians of _RUNS calls each. Takes twice _BYTES of the device's memory while it runs."""
    source = torch.zeros(_BYTES // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    programs = source.numel() // (_BLOCK * _BLOCKS)

    def read(_: object) -> None:
        _read_kernel[(programs,)](source, target, _BLOCK, _BLOCKS, num_warps=8)

    launch_ns = _median(clock, lambda _: _empty_kernel[(1,)](num_warps=1))
    copy_ns = _median(clock, lambda _: target.copy_(source))
    return Ceilings(launch_ns, 2 * _BYTES / copy_ns * 1e9, _BYTES / _median(clock, read) * 1e9)


def _median(clock: Clock, call: Callable[[object], object]) -> float:
    """Nanoseconds; the first call, which compiles, is not counted."""
    times = [clock.time(call, None)[1] for _ in range(_RUNS + 1)]
    return statistics.median(times[1:])
