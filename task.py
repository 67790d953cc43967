"""The task as the leaderboard states it: the types of the call and the official cases, as data.

Names and values are those of amd-mixed-mla (gpu-mode/reference-kernels, problems/amd_202602/mixed-mla); the official
eval.py imports `TestSpec` from here. submission.custom_kernel says what the arrays mean.
"""

from typing import TypedDict, TypeVar

import torch

# (q, kv_data, qo_indptr, kv_indptr, config), see reference.generate_input for shapes and dtypes.
input_t = TypeVar("input_t", bound=tuple[torch.Tensor, dict, torch.Tensor, torch.Tensor, dict])
# (total_q, 16, 512) bfloat16
output_t = TypeVar("output_t", bound=torch.Tensor)


class TestSpec(TypedDict):
    """One case: what generate_input takes."""

    batchsize: int
    qseqlen: int
    kvseqlen: int
    seed: int


TestSpec.__test__ = False  # pytest collects classes by the prefix Test; this one is no test


def _cases(*rows: tuple[int, int, int]) -> list[TestSpec]:
    return [TestSpec(batchsize=b, qseqlen=1, kvseqlen=n, seed=seed) for b, n, seed in rows]


TESTS = _cases(
    (4, 1024, 4220),
    (32, 1024, 5412),
    (64, 8192, 1360),
    (256, 8192, 9826),
)

BENCHMARKS = _cases(
    (4, 1024, 4217),
    (4, 8192, 4220),
    (32, 1024, 5412),
    (32, 8192, 5415),
    (64, 1024, 1357),
    (64, 8192, 1360),
    (256, 1024, 9823),
    (256, 8192, 9826),
)
