"""The clocks: how long one call takes, with cold caches on a GPU, by the wall on a CPU."""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

# Several times the last-level cache: an H200 has 60 MB of L2, an MI355X 256 MB of Infinity Cache.
_FLUSH_BYTES = 1 << 30
# Writing keeps the GPU busy for 1 to 2 ms, in which the host runs ahead and its launch overhead stays out of the time,
# as it does behind the official flush of 62.5 GiB; one pass would hide 0.1 to 0.2 ms, less than some submissions need.
_FLUSH_PASSES = 8


class Clock(Protocol):
    """Times one call: time(call, argument) gives what it returned, and nanoseconds."""

    description: str

    def time(self, call: Callable[..., T], argument: object) -> tuple[T, float]: ...


class EventClock:
    """GPU events just before and just after the call, caches flushed before it."""

    description = "GPU events around the call, caches flushed before it"

    def __init__(self, device: torch.device):
        self._device = device
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time(self, call: Callable[..., T], argument: object) -> tuple[T, float]:
        torch.cuda.synchronize(self._device)
        for value in range(_FLUSH_PASSES):
            self._flush.fill_(value)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call(argument)
        end.record()
        torch.cuda.synchronize(self._device)
        return result, start.elapsed_time(end) * 1e6


class WallClock:
    """The wall clock of a CPU, caches as they are."""

    description = "CPU wall clock: the time plain torch takes on this CPU, says nothing about a GPU"

    def time(self, call: Callable[..., T], argument: object) -> tuple[T, float]:
        start = time.perf_counter_ns()
        result = call(argument)
        return result, float(time.perf_counter_ns() - start)


def clock_for(device: torch.device) -> Clock:
    return EventClock(device) if device.type == "cuda" else WallClock()
