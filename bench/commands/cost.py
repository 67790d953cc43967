"""`mla cost`: the host time of a warm custom_kernel, per runner, with nothing behind the kernels it calls.

In the place of mla_decode_fwd and of the Triton kernels stand functions that do nothing. What custom_kernel takes
beyond a bare call of them with the same arguments is the submission's own Python; the parts are timed one by one beside
it, the rest is "other". What aiter or Triton take to launch is in neither. On a CPU the q cast does its work within the
call: there the runners that cast are slower by that.
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from rich.console import Console
from rich.table import Column

import sm_90
import submission
from bench.contest.plans import is_fused
from bench.show.console import new_table, print_line
from reference import default_device, generate_input
from submission import FusedRunner, Plan, Tile, check_input, check_plan, custom_kernel, plan_for, runner_of
from task import input_t

import aiter  # isort: skip (reference has chosen it)

try:
    from triton.runtime.jit import KernelInterface
except ImportError:  # our own kernels cannot run then
    KernelInterface = None

SHAPE = (4, 1024)
PLANS = {
    "bf16": Plan("bf16", num_splits=1),
    "fp8_nonpersistent": Plan("fp8_nonpersistent", num_splits=1),
    "a16w8_persistent": Plan("a16w8_persistent", num_splits=4),
    "a8w8_persistent": Plan("a8w8_persistent", num_splits=4),
}
if KernelInterface is not None:
    PLANS |= {
        "fused": Plan("fused", num_splits=16, tile=Tile("fp8", warps=8)),
        "fused, two kernels": Plan("fused", num_splits=16, tile=Tile("fp8", warps=8, merge="kernel")),
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
    sm_90.install()
    device = device or default_device()
    data = generate_input(SHAPE[0], 1, SHAPE[1], 0, device=device)
    plans = PLANS | ({"wgmma": plan_for(*SHAPE, table="sm_90")} if sm_90.can_run(device) else {})
    with _nothing_behind(device) as launched:
        return [_measure(name, plan, data, launched) for name, plan in plans.items()]


@contextmanager
def _nothing_behind(device: torch.device) -> Iterator[dict[str, Callable[[], None]]]:
    """Within the block no kernel does anything; the last call of each, with its arguments, is kept in the dict."""
    launched: dict[str, Callable[[], None]] = {}

    def decode(*args: object, **kwargs: object) -> None:
        launched["decode"] = lambda: decode(*args, **kwargs)

    def launch(kernel: object, grid: tuple[int, ...], **arguments: object) -> None:
        launched[kernel.__name__] = lambda: kernel[grid](**arguments)

    def target(runner: FusedRunner, device: torch.device) -> str:
        return "interpreter"

    def of_grid(kernel: object, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(launch, kernel, grid)

    decode.__signature__ = inspect.signature(aiter.mla.mla_decode_fwd)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(aiter.mla, "mla_decode_fwd", decode))
        if KernelInterface is not None:
            stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", of_grid))
        if device.type == "cpu":  # where nothing is launched, nothing need be compiled
            stack.enter_context(mock.patch.object(FusedRunner, "target", target))
        yield launched


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
        plan_for(batch, length, device=q.device)
        check_plan(plan, length)

    parts = {
        "input checks": lambda: check_input(data),
        "plan": look_up,
        "output": lambda: torch.empty(shape, dtype=torch.bfloat16, device=q.device),
    }
    if is_fused(plan):
        runner = runner_of(plan)
        given = check_input(data), plan, parts["output"](), runner.target(q.device)
        parts["launches"] = lambda: runner.launches(*given)
    else:
        parts["cache view"] = lambda: kv_data["fp8"][0].view(-1, 1, 1, submission.QK_HEAD_DIM)
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
