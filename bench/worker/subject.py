"""A submission under test: called as the server calls it, its inputs watched around every call."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.modules import describe_error
from bench.worker.loading import Submission
from reference import NUM_HEADS, V_HEAD_DIM, ExactVerdict, check_exact, generate_input
from task import TestSpec, input_t, output_t

Shape = tuple[int, int]  # (batch size, KV length)


class SubmissionFaultError(Exception):
    """The submission raised, or did what no caller can use; the message is the finding."""


class Subject:
    """A submission on a device, called as the server calls it: custom_kernel(data), no strict mode."""

    def __init__(self, submission: Submission, device: torch.device, table: str | None, report: Callable):
        self.device = device
        self.path = submission.path
        self.report = report
        self._submission = submission
        self._table = table

    def draw(self, shape: Shape, seed: int) -> input_t:
        return generate_input(shape[0], 1, shape[1], seed, device=self.device)

    def precision(self, shape: Shape) -> str | None:
        """What the file says it reads at a shape, None where it says nothing."""
        plan = self._submission.plan_info(*shape, self._table, self.device)
        return plan.precision if plan else None

    def call(self, data: input_t) -> output_t:
        """Its output. Raises SubmissionFaultError for an exception, an output of another kind than the task's or still
        unfinished, or an input that was changed: the truth is made from it afterwards."""
        batch, length = data[4]["batch_size"], data[4]["kv_seq_len"]
        before = fingerprint(data)
        try:
            output = self.kernel(data)
        except (Exception, SystemExit) as error:
            raise SubmissionFaultError(f"raises {describe_error(error, self.path)}") from error
        if type(output) is not torch.Tensor:
            raise SubmissionFaultError(f"returns {type(output).__name__}, expected a tensor")
        expected = ((batch, NUM_HEADS, V_HEAD_DIM), torch.bfloat16, data[0].device)
        got = (tuple(output.shape), output.dtype, output.device)
        if got != expected:
            raise SubmissionFaultError(f"returns {_kind(got)}, expected {_kind(expected)}")
        if output.is_cuda:
            _check_finished(output)
        self.report("looking at its output", None)
        changed = _changes(before, fingerprint(data))
        if changed:
            raise SubmissionFaultError(f"{label((batch, length))}: {changed}")
        return output

    def kernel(self, data: input_t) -> object:
        """What custom_kernel returns, with nothing around the call."""
        case = TestSpec(batchsize=data[4]["batch_size"], qseqlen=1, kvseqlen=data[4]["kv_seq_len"], seed=0)
        function = self._submission.kernel(case, self._table, self.device, strict=False)
        self.report("calling the submission", None)
        return function(data)

    def waits(self, data: input_t) -> int:
        """How often a call makes the host wait for the GPU, as far as torch notices."""
        synchronize, explicit = torch.cuda.synchronize, []

        def counted(*args: object, **kwargs: object) -> None:
            explicit.append(args)
            synchronize(*args, **kwargs)

        torch.cuda.synchronize = counted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.kernel(data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize = synchronize
        return len(explicit) + sum("synchronizing CUDA operation" in str(item.message) for item in caught)

    def judge(self, data: input_t, output: output_t, *, standard_normal: bool = True) -> ExactVerdict:
        shape = data[4]["batch_size"], data[4]["kv_seq_len"]
        return check_exact(data, output, self.precision(shape), standard_normal=standard_normal)


def label(shape: Shape) -> str:
    return f"{shape[0]} × {shape[1]}"


def count(shapes: Sequence[Shape]) -> str:
    return f"{len(shapes)} shape{'s' * (len(shapes) != 1)}"


def tensors_of(data: object) -> Iterator[torch.Tensor]:
    """All tensors of an input, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from tensors_of(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from tensors_of(value)


def overwrite(data: object, other: object) -> None:
    """Give all tensors of an input the values of another, past torch's version counters, as a kernel writes."""
    for mine, new in zip(tensors_of(data), tensors_of(other), strict=True):
        mine.data.view(torch.uint8).copy_(new.view(torch.uint8))


def _kind(parts: tuple) -> str:
    return f"{parts[0]} {str(parts[1]).removeprefix('torch.')} on {parts[2]}"


def _check_finished(output: output_t) -> None:
    """What the current queue sees after the call must be what is there when the whole GPU is idle."""
    seen = output.clone()
    torch.cuda.synchronize(output.device)
    if not torch.equal(seen.view(torch.int16), output.view(torch.int16)):
        raise SubmissionFaultError("the output is still written to when the caller's queue has come to its end")


# ---- Whether an input was changed ----

_ROW = 1024  # words of 4 bytes
_WEIGHTS = torch.tensor([random.getrandbits(31) | 1 for _ in range(_ROW)], dtype=torch.int32)
_STEP, _START = (random.getrandbits(62) | 1 for _ in range(2))


def fingerprint(data: input_t) -> tuple[dict, list[str], list[int]]:
    """The config, the names in kv_data, and for each tensor a number that follows from all its bytes, in order."""
    sums = torch.stack([_weighted_sum(tensor) for tensor in tensors_of(data)])
    return dict(data[4]), list(data[1]), sums.tolist()


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Modulo 2^32 in a row of words, modulo 2^64 over the rows; each place has a weight that no file can know."""
    raw = tensor.detach().contiguous().view(torch.uint8).flatten()
    padding = -raw.numel() % (4 * _ROW)
    whole = raw[: raw.numel() - raw.numel() % (4 * _ROW)].view(torch.int32).view(-1, _ROW)
    rest = torch.nn.functional.pad(raw[whole.numel() * 4 :], (0, padding)).view(torch.int32).view(-1, _ROW)
    weights = _WEIGHTS.to(tensor.device)
    at_a_time = 32 if tensor.device.type == "cpu" else 65_536  # what stays in a core's cache; what keeps a GPU busy
    parts = [(part * weights).sum(1, dtype=torch.int32) for part in (*whole.split(at_a_time), rest)]
    rows = torch.cat(parts).long()
    return (rows * (torch.arange(len(rows), device=rows.device) * _STEP + _START)).sum()


def _changes(before: tuple[dict, list[str], list[int]], after: tuple[dict, list[str], list[int]]) -> str:
    if before[:2] != after[:2]:
        return "config or kv_data was changed"
    changed = sum(a != b for a, b in zip(before[2], after[2], strict=True))
    return f"{changed} of the input tensors were written to" if changed else ""
