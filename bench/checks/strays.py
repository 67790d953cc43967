"""strays: rows that belong to nobody, or to other sequences, have no part in the answer."""

from collections.abc import Iterator

import torch

from bench.checks.needles import listed
from bench.checks.scope import STILL, Outcome, Scope, differs
from bench.worker.subject import Shape, Subject, count, label
from reference import relative_l2
from task import input_t, output_t

_BF16_NAN, _FP8_NAN, _E8M0_NAN = 0x7FC0, 0x7F, 0xFF


def no_stray_reads(subject: Subject, scope: Scope) -> Outcome:
    outcome, tried = Outcome(), 0
    for shape in scope.small:
        data = subject.draw(shape, scope.seed)
        clean = subject.call(data)
        for what, others in _poisoned_surroundings(data):
            tried += 1
            if differs(subject.call(others), clean):
                outcome.findings.append(f"{label(shape)}: the output changes with {what}")
        tried += _poison_others(subject, shape, data, clean, shape[0].bit_length(), outcome)
    for shape in scope.some_large:
        data = subject.draw(shape, scope.seed)
        tried += _poison_others(subject, shape, data, subject.call(data).clone(), 1, outcome)
        del data
    outcome.note = f"{tried} poisoned inputs in {count([*scope.small, *scope.some_large])}"
    return outcome


def _poison_others(subject: Subject, shape: Shape, data: input_t, clean: output_t, bits: int, outcome: Outcome) -> int:
    """Poison the sequences whose number has a bit, then those that have not, a bit at a time; returns how many calls
    that took. With all bits every sequence is poisoned once beside each other one; with one bit, beside its neighbours.
    """
    numbers, changed, calls = torch.arange(shape[0], device=subject.device), set(), 0
    for bit in range(bits):
        for chosen in (numbers >> bit & 1 == 0, numbers >> bit & 1 == 1):
            if chosen.any() and not chosen.all():
                calls += 1
                output = subject.call(_with_others_poisoned(data, chosen))
                still = relative_l2(output[chosen], clean[chosen].float()) <= STILL
                changed |= set(numbers[chosen][~still].tolist())
    if changed:
        plural = "s" * (len(changed) == 1)
        outcome.findings.append(
            f"{label(shape)}: {listed('sequence', changed)} change{plural} with the rows of other sequences"
        )
    return calls


def _poisoned_surroundings(data: input_t) -> Iterator[tuple[str, input_t]]:
    """The same values as slices of larger storage that is NaN, then huge; and mxfp4 scales padded with NaN."""
    q, kv_data, *rest = data
    values, scale = kv_data["fp8"]
    codes, scales = kv_data["mxfp4"]
    fills = {
        "NaN in the rows before and after the cache": (torch.nan, torch.nan, _E8M0_NAN),
        "huge values in the rows before and after the cache": (3e38, 448.0, 254),
    }
    for what, (bf16, fp8, e8m0) in fills.items():
        surrounded = {
            "bf16": _inside(kv_data["bf16"], bf16),
            "fp8": (_inside(values, fp8), _inside(scale, bf16)),
            "mxfp4": (_inside(codes.view(torch.uint8), 0x77).view(codes.dtype), _padded(scales, e8m0)),
        }
        qo_indptr, kv_indptr, config = rest
        around = _inside(qo_indptr, -(2**31)), _inside(kv_indptr, 2**31 - 1)
        yield what, (_inside(q, bf16), surrounded, *around, config)


def _inside(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    kind = tensor.dtype if tensor.dtype == torch.int32 else torch.float32
    storage = torch.full((tensor.shape[0] + 512, *tensor.shape[1:]), fill, device=tensor.device, dtype=kind)
    storage = storage.to(tensor.dtype)
    storage[256:-256] = tensor
    return storage[256:-256]


def _padded(scales: torch.Tensor, fill: int) -> torch.Tensor:
    """In aiter's padded layout: rows up to a multiple of 256, columns up to one of 8."""
    rows, columns = scales.shape
    storage = torch.full((-(-rows // 256) * 256, -(-columns // 8) * 8), fill, dtype=torch.uint8)
    storage = storage.to(scales.device)
    storage[:rows, :columns] = scales.view(torch.uint8)
    return storage.view(scales.dtype)


def _with_others_poisoned(data: input_t, chosen: torch.Tensor) -> input_t:
    """NaN in the cache rows of all sequences but the chosen, a bool for each; the scale of the fp8 cache stays."""
    q, kv_data, *rest = data
    mine = chosen.repeat_interleave(data[4]["kv_seq_len"])

    def only_mine(tensor: torch.Tensor, nan: int, bits: torch.dtype) -> torch.Tensor:
        poisoned = tensor.view(bits).clone()
        poisoned[: len(mine)].masked_fill_(~mine.view(-1, *[1] * (tensor.dim() - 1)), nan)
        return poisoned.view(tensor.dtype)

    values, scale = kv_data["fp8"]
    codes, scales = kv_data["mxfp4"]
    poisoned = {
        "bf16": only_mine(kv_data["bf16"], _BF16_NAN, torch.int16),
        "fp8": (only_mine(values, _FP8_NAN, torch.uint8), scale),
        "mxfp4": (codes, only_mine(scales, _E8M0_NAN, torch.uint8)),
    }
    return q, poisoned, *rest
