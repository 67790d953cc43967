"""A census of the tokens: which of them one output on random data lacks, or counts twice, in every sequence.

Leaving a token out moves an output in a direction that is known. Rounding has no part of note in it, a lost token all
of it: the error's share in that direction is about 0 for a token that counts, 1 for one that is lost, −1 for one that
counts twice. This sees single losses that a gate on a whole sequence lets through; where much is lost the directions
mix, and needles are needed. Nothing here runs a submission.
"""

from dataclasses import dataclass, field

import torch

from reference import PRECISIONS, V_HEAD_DIM, cast_q, dequantize_rows
from task import input_t, output_t

_SHARE = 0.5  # of a token's direction in the error, from which on it is lost or counts twice
_SIGMAS = 7  # by which that share must stand out of the noise for a token to be judged at all
_CHUNK = 8192  # tokens at a time
# Where probabilities are rounded to fp8, unscaled, one below this share of its head's largest has lost its precision.
_FP8_NORMAL = 2.0**-6


@dataclass
class Census:
    """judged: how many tokens of all sequences could be. lost and doubled: (sequence, position) over all heads;
    by_head: (sequence, head, position) lost or doubled for a head alone."""

    judged: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    doubled: list[tuple[int, int]] = field(default_factory=list)
    by_head: list[tuple[int, int, int]] = field(default_factory=list)


def take_census(data: input_t, output: output_t, precision: str) -> Census:
    """Judge each token by the error of `output` (batch, 16, 512) against attention at `precision`; uniform lengths."""
    q, kv_data, _, _, config = data
    length, wanted = config["kv_seq_len"], PRECISIONS[precision]
    if length == 1:
        return Census(judged=config["batch_size"])  # a token alone is the whole answer
    queries, census = cast_q(q, wanted.q_cast), Census()
    least = 0.0 if wanted.q_cast == "none" else _FP8_NORMAL
    for b in range(config["batch_size"]):
        chunks = [slice(i, min(i + _CHUNK, (b + 1) * length)) for i in range(b * length, (b + 1) * length, _CHUNK)]
        rows = [dequantize_rows(kv_data, wanted.cache, chunk) for chunk in chunks]
        weights = torch.softmax(torch.cat([queries[b] @ r.T for r in rows], 1) * config["sm_scale"], -1)
        values = [r[:, :V_HEAD_DIM] for r in rows]
        truth = sum(w @ v for w, v in zip(weights.split([len(v) for v in values], 1), values, strict=True))
        error = output[b].float() - truth
        # Without token t the output of head h would be off by ratio[h, t] × (truth[h] − value[t]).
        counted = weights >= least * weights.amax(1, keepdim=True)
        ratio = counted * weights / (1 - weights).clamp(min=1e-6)
        along = ratio * ((error * truth).sum(1)[:, None] - torch.cat([error @ v.T for v in values], 1))
        norms = torch.cat([v.square().sum(1) for v in values])
        across = torch.cat([truth @ v.T for v in values], 1)
        size = ratio.square() * (truth.square().sum(1)[:, None] - 2 * across + norms).clamp(min=0)
        noise = error.square().sum(1)[:, None] / V_HEAD_DIM * size
        share, judged = _share(along.sum(0), size.sum(0), noise.sum(0))
        census.judged += int(judged.sum())
        census.lost += [(b, t) for t in (judged & (share > _SHARE)).nonzero().flatten().tolist()]
        census.doubled += [(b, t) for t in (judged & (share < -_SHARE)).nonzero().flatten().tolist()]
        share, judged = _share(along, size, noise)
        whole = (judged & (share.abs() > _SHARE)).nonzero().tolist()
        census.by_head += [(b, h, t) for h, t in whole]
    return census


def _share(along: torch.Tensor, size: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The error's share in each direction, and whether it stands out of the noise."""
    size = size.clamp(min=torch.finfo(size.dtype).tiny)
    return along / size, _SIGMAS * noise.sqrt() < _SHARE * size
