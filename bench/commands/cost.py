"""`mla cost`: the host time of a warm custom_kernel, per runner, with nothing behind the kernels it calls.

In the place of mla_decode_fwd and of the Triton kernels stand functions that do nothing. What custom_kernel takes
beyond a bare call of them with the same arguments is the submission's own Python; the parts are timed one by one beside
it, the rest is "other". What aiter or Triton take to launch is in neither. On a CPU the q cast does its work within the
call: there the runners that cast are slower by that.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Column

import submission
from bench.show.console import new_table, print_line
from reference import default_device, generate_input
from submission import RUNNERS, SM90_PLAIN_TABLE, SM90_TABLE, Plan, custom_kernel
from task import input_t

import aiter  # isort: skip (reference has chosen it)

SHAPE = (4, 1024)
PLANS = {name: Plan(name, 4 if runner.persistent else 1) for name, runner in RUNNERS.items() if runner.on_aiter}
if submission.triton is not None:
    _FUSED = SM90_PLAIN_TABLE[SHAPE]
    PLANS |= {
        "fused": replace(_FUSED, tile=replace(_FUSED.tile, merge="last")),
        "fused, two kernels": replace(_FUSED, tile=replace(_FUSED.tile, merge="kernel")),
    }
_CALLS, _ROUNDS = 100, 45  # few calls a round: a GPU's launch queue must not fill


@dataclass(frozen=True)
class Cost:
    """Microseconds of host time: the whole call, the bare one, and the parts of the difference."""

    runner: str
    whole: float
    bare: float
    parts: dict[str, float]

    @property
    def on_top(self) -> float:
        return self.whole - self.bare

    @property
    def other(self) -> float:
        return self.on_top - sum(self.parts.values())


def measure(device: torch.device | None = None) -> list[Cost]:
    """The cost of every plan of PLANS at SHAPE, and of the table sm_90's where that can run, on `device` (by default
    the GPU, if there is one)."""
    device = device or default_device()
    data = generate_input(SHAPE[0], 1, SHAPE[1], 0, device=device)
    plans = PLANS | ({"fused, wgmma": SM90_TABLE[SHAPE]} if submission._has_wgmma(device) else {})
    with _nothing_behind() as launched:
        return [_measure(name, plan, data, launched) for name, plan in plans.items()]


@contextmanager
def _nothing_behind() -> Iterator[dict[str, Callable[[], None]]]:
    """Within the block no kernel does anything; the last call of each, with its arguments, is kept in the dict."""
    launched: dict[str, Callable[[], None]] = {}

    def decode(*args: object, **kwargs: object) -> None:
        launched["decode"] = lambda: decode(*args, **kwargs)

    class Kernel:
        """In the place of a Triton kernel: kernel[grid](**arguments)."""

        def __init__(self, name: str):
            self.__name__ = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return functools.partial(self.launch, grid)

        def launch(self, grid: tuple[int, ...], **arguments: object) -> None:
            launched[self.__name__] = lambda: self[grid](**arguments)

    original = aiter.mla.mla_decode_fwd
    decode.__signature__ = inspect.signature(original)
    names = (*submission._KERNEL_OF_DESIGN.values(), RUNNERS["fused"].reduce)
    kernels = {name: getattr(submission, name) for name in names}
    aiter.mla.mla_decode_fwd = decode
    vars(submission).update({name: Kernel(name) for name in kernels})
    submission._triton_target.cache_clear()  # without a GPU it hangs on what the kernel is
    try:
        yield launched
    finally:
        aiter.mla.mla_decode_fwd = original
        vars(submission).update(kernels)
        submission._triton_target.cache_clear()


def _measure(name: str, plan: Plan, data: input_t, launched: dict[str, Callable[[], None]]) -> Cost:
    launched.clear()
    whole = _time(lambda: custom_kernel(data, plan=plan))
    calls = list(launched.values())
    bare = _time(lambda: [call() for call in calls])
    return Cost(name, whole, bare, {part: _time(call) for part, call in _parts(data, plan).items()})


def _parts(data: input_t, plan: Plan) -> dict[str, Callable[[], object]]:
    q, kv_data, *_, config = data
    batch, length = config["batch_size"], config["kv_seq_len"]
    shape = (batch, submission.NUM_HEADS, submission.V_HEAD_DIM)

    def look_up() -> None:
        submission.plan_for(batch, length, device=q.device)
        submission._check_plan(plan, length, False)

    parts = {
        "input checks": lambda: submission._check_input(data),
        "plan": look_up,
        "output": lambda: torch.empty(shape, dtype=torch.bfloat16, device=q.device),
    }
    if RUNNERS[plan.runner].on_aiter:
        parts["cache view"] = lambda: kv_data["fp8"][0].view(-1, 1, 1, submission.QK_HEAD_DIM)
    else:
        given = (q, *kv_data["fp8"], data[3], config["sm_scale"], plan, parts["output"](), data[3])
        target = submission._triton_target(q.device, plan.tile.design)
        parts["launches"] = lambda: submission.fused_launches(*given, target)
    if plan.precision == "a8w8":
        parts["q cast"] = lambda: q.to(submission.FP8)
    return parts


def _time(call: Callable[[], object]) -> float:
    """Microseconds of host time a call: the mean in the least disturbed round."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / _CALLS / 1e3)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return min(times)


def show(costs: list[Cost], device: torch.device, out: Console) -> None:
    print_line(out, f"host time of a warm call, µs, at {SHAPE[0]} × {SHAPE[1]} on {device}", "bold")
    names = list(dict.fromkeys(part for cost in costs for part in cost.parts))
    table = new_table("runner", "whole", "bare", "on top", *(Column(name, justify="right") for name in names), "other")
    for cost in costs:
        numbers = [cost.whole, cost.bare, cost.on_top, *(cost.parts.get(name) for name in names), cost.other]
        table.add_row(cost.runner, *("–" if n is None else f"{n:.1f}" for n in numbers))
    out.print(table)
