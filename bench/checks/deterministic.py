"""deterministic: the same data gives the same bits, whatever unwritten memory holds."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.checks.scope import STILL, Outcome, Scope, differs
from bench.worker.subject import Subject, SubmissionFaultError, count, label
from reference import relative_l2, worst_of

REPEATS = 20


def deterministic(subject: Subject, scope: Scope) -> Outcome:
    """Bit-identical over calls, and whatever memory held before. A spread within STILL is stated and no fault."""
    outcome, spread, waits = Outcome(), 0.0, 0
    on_gpu = subject.device.type == "cuda"
    shapes = scope.shapes if on_gpu else scope.small  # a CPU takes minutes over the others
    for shape in shapes:
        data = subject.draw(shape, scope.seed)
        first = subject.call(data)
        for _ in range(REPEATS - 1):
            again = subject.call(data)
            if not torch.equal(again.view(torch.int16), first.view(torch.int16)):
                spread = max(spread, worst_of(relative_l2(again, first.float())))
                if not spread <= STILL:
                    outcome.findings.append(f"{label(shape)}: two calls on the same data differ by {spread:.2g}")
                    break
        with contextlib.suppress(SubmissionFaultError), _Unwritten():
            if differs(subject.call(data), first):
                outcome.findings.append(f"{label(shape)}: the output changes with what unwritten memory holds")
        if on_gpu:
            waits = max(waits, subject.waits(data))
    identical = "bit-identical" if spread == 0.0 else f"spread up to {spread:.2g} (relative L2)"
    outcome.note = f"{REPEATS} calls in {count(shapes)}: {identical}"
    if waits:
        outcome.note += f"; a warm call makes the host wait for the GPU {waits} times"
    return outcome


class _Unwritten(TorchDispatchMode):
    """Within the block, memory that torch hands out unwritten holds NaN, and −1 in integers."""

    _OPERATORS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name.removeprefix("aten::") in self._OPERATORS:
            bytes_of = torch.empty(0, dtype=torch.uint8, device=result.device)
            bytes_of.set_(result.untyped_storage()).fill_(0xFF)
        return result
