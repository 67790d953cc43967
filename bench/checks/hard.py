"""hard: numbers that real data will bring one day: large logits, outliers, denormals, extreme scales."""

from collections.abc import Callable

import torch

from bench.checks.scope import Outcome, Scope
from bench.worker.subject import Subject, count, label
from reference import NUM_HEADS, PRECISIONS, pack_input

# float32 holds a logit to a relative 2^-24; beyond this that is no longer small beside gate A.
MAX_LOGIT = 4000


def hard_numbers(subject: Subject, scope: Scope) -> Outcome:
    outcome, worst = Outcome(), 0.0
    for shape in scope.small:
        q, kv_data, *_ = subject.draw(shape, scope.seed)
        for what, change in HARD.items():
            subject.report(f"{what}, {label(shape)}", None)
            data = pack_input(*change(q, kv_data["bf16"]), shape[0])
            output = subject.call(data)
            if not torch.isfinite(output).all():
                outcome.findings.append(f"{label(shape)}, {what}: NaN or infinity in the output")
                continue
            verdict = subject.judge(data, output, standard_normal=False)
            worst = max(worst, verdict.kernel_error / PRECISIONS[verdict.precision].kernel_budget)
            if not verdict.ok:
                outcome.findings.append(f"{label(shape)}, {what}: {verdict.message}")
    outcome.note = f"{len(HARD)} kinds in {count(scope.small)}, |q| ≤ 448, at most {worst:.0%} of gate A's budget"
    return outcome


def _outlier_channel(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kv = kv.clone()
    kv[..., 77] *= 1000
    return q, kv


def _denormal_values(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A key-only channel that sets the fp8 cache's scale and meets a zero in q."""
    q, kv = q.clone(), kv.clone()
    q[..., 550] = 0
    kv[..., 550] *= 10_000
    return q, kv


def _equal_keys(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q, kv[:1].expand_as(kv).contiguous()


def _negative_zeros(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kv = kv.clone()
    kv[::2] = -0.0
    q = q.clone()
    q[:, ::2] = -0.0
    return q, kv


def _to_peak(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (q.float() * (448 / q.abs().amax().float())).to(q.dtype), kv


def _large(kv: torch.Tensor) -> torch.Tensor:
    return (kv.float() * 4.48e6 / 5).to(kv.dtype)


def _one_dim_a_head(q: torch.Tensor) -> torch.Tensor:
    """Head h meets one dim of the cache, with the least normal number of fp8."""
    only = torch.zeros_like(q)
    heads = torch.arange(NUM_HEADS, device=q.device)
    only[:, heads, heads * 36] = 2.0**-6
    return only


# Each takes q and the cache, standard normal, and keeps |q| ≤ 448, the range of the runners that cast q with scale 1,
# and |logits| ≤ MAX_LOGIT.
HARD: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "logits to about ±80": lambda q, kv: (q * 18, kv),
    "q at ±448, the edge of fp8": _to_peak,
    "one channel 1000 times the others": _outlier_channel,
    "all values denormal in fp8": _denormal_values,
    "all keys equal": _equal_keys,
    "all values negative": lambda q, kv: (q, -kv.abs()),
    "all logits near −120": lambda q, kv: (q.abs() * 8, -kv.abs()),
    "a cache of denormals": lambda q, kv: (q, (kv.float() * 2.0**-130).to(kv.dtype)),
    "a cache of zeros": lambda q, kv: (q, torch.zeros_like(kv)),
    "a cache scale of 1e-12": lambda q, kv: (q, (kv.float() * 4e-10 / 5).to(kv.dtype)),
    "a cache scale of 1e4": lambda q, kv: (q / 9e5, _large(kv)),
    "a cache scale of 1e4, logits to ±2500": lambda q, kv: (_one_dim_a_head(q), _large(kv)),
    "half of everything −0": _negative_zeros,
}
