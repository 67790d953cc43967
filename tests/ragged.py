"""Ragged sequences for the fused kernel, with float64 attention over what their cache holds."""

from collections.abc import Callable

import torch

import submission
from reference import quantize_fp8, quantize_mxfp4
from submission import Launch, Plan, Problem, Tile, runner_of
from tests.cases import mxfp4_nan_scale
from tests.oracle import mxfp4_values, numpy_of

SM_SCALE = 1 / 24
CACHES = ("bf16", "fp8", "mxfp4")
RAGGED = [70, 0, 1, 33]


class Ragged:
    """Sequences of any lengths with a cache in one format, and float64 attention over what that format holds."""

    def __init__(self, lengths: list[int], cache: str, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.q = torch.randn(len(lengths), 16, 576, generator=generator).bfloat16()
        kv = torch.randn(max(sum(lengths), 1), 1, 576, generator=generator).bfloat16()
        self.indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        self.hold(kv, cache)
        self.out = torch.full((len(lengths), 16, 512), torch.nan)

    def hold(self, kv: torch.Tensor, cache: str) -> None:
        """Quantise (total, 1, 576) bfloat16, and keep what that leaves in float64."""
        self.cache, self.scale = kv, torch.ones(1)
        if cache == "fp8":
            self.cache, self.scale = quantize_fp8(kv)
        if cache == "mxfp4":
            self.cache, self.scale = quantize_mxfp4(kv)
            self.held = mxfp4_values(numpy_of(self.cache)[:, 0], numpy_of(self.scale))
        else:
            self.held = numpy_of(self.cache)[:, 0] * numpy_of(self.scale)

    def move_to_gpu(self) -> None:
        """As bytes: torch copies not every type with deterministic algorithms asked for."""
        for name in ("q", "cache", "scale", "indptr", "out"):
            tensor = getattr(self, name)
            setattr(self, name, tensor.view(torch.uint8).cuda().view(tensor.dtype))

    def launches(self, plan: Plan, target: str) -> list[Launch]:
        caches = [self.cache, self.cache, self.scale, self.cache, self.scale]  # a plan takes its own
        problem = Problem(self.q, *caches, None, self.indptr, len(self.lengths), max(self.lengths), SM_SCALE)
        return runner_of(plan).launches(problem, plan, self.out, target)

    @property
    def tickets(self) -> torch.Tensor:
        return submission._tickets(len(self.lengths), self.q.device)

    def exact(self, sequence: int) -> torch.Tensor:
        """(16, 512) float64."""
        rows = torch.from_numpy(self.held[self.indptr[sequence] : self.indptr[sequence + 1]])
        return torch.softmax(self.q[sequence].double().cpu() @ rows.T * SM_SCALE, -1) @ rows[:, :512]

    def errors(self) -> list[float]:
        """Relative L2 of each sequence; of an empty one, the largest element."""
        errors = []
        for i, length in enumerate(self.lengths):
            got = self.out[i].double().cpu()
            if length:
                exact = self.exact(i)
                errors.append(((got - exact).norm() / exact.norm()).item())
            else:
                errors.append(got.abs().max().item())
        return errors


def hard(lengths: list[int], cache: str, scale_q: float, change: Callable[[torch.Tensor], torch.Tensor]) -> Ragged:
    """A case with its q times scale_q, and with what `change` makes of a standard normal cache."""
    case = Ragged(lengths, cache, seed=9)
    kv = torch.randn(sum(lengths), 1, 576, generator=torch.Generator().manual_seed(5)).bfloat16()
    case.q = (case.q * scale_q).bfloat16()
    case.hold(change(kv).bfloat16(), cache)
    return case


def with_nan(cache: str) -> Ragged:
    """tests/cases/mxfp4_nan_scale.py, or as much in another format: one NaN in the first of two sequences, among the
    dims that are key only."""
    case = Ragged(mxfp4_nan_scale.LENGTHS, cache, seed=0)
    if cache == "mxfp4":
        case.q, elements, scales = mxfp4_nan_scale.build()
        case.cache, case.scale = elements.view(case.cache.dtype), scales.view(case.scale.dtype)
        case.held = mxfp4_values(elements.numpy()[:, 0], scales.numpy())
    else:
        case.cache[mxfp4_nan_scale.TOKEN, 0, 32 * mxfp4_nan_scale.BLOCK] = torch.nan
    return case


def fused_plan(cache: str, splits: int, block: int = 32, merge: str = "last", warps: int = 4, stages: int = 2) -> Plan:
    return Plan("fused", num_splits=splits, tile=Tile(cache, block, warps, stages, merge))
