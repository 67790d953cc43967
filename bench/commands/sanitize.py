"""The fused plans on small shapes under a GPU sanitizer: `compute-sanitizer mla sanitize`.

Every tile of the GPU's own tables and the default one of each cache format, in several splits, with each merge that its
runner has, on ragged and empty sequences, twice in a row on the same tickets. The expected outputs are computed on the
CPU, so that next to nothing but our kernels runs on the GPU. Prints "ok" or "WRONG" per plan; exit code 0 if all are
ok, 1 if not, 2 without a GPU.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

import sm_90
from bench.basics import UserError
from bench.contest.contestants import tables_of
from bench.contest.plans import is_fused, spec_of
from reference import (
    NUM_HEADS,
    PRECISIONS,
    QK_HEAD_DIM,
    SM_SCALE,
    V_HEAD_DIM,
    exact_attention,
    quantize_fp8,
    quantize_mxfp4,
    relative_l2,
    worst_of,
)
from submission import FUSED_PRECISIONS, RUNNERS, TABLES, Plan, Problem, Tile, clear_caches, runner_of
from task import input_t

LENGTHS = (70, 0, 1, 257, 33)
SPLITS = (1, 3, 8)


def plans(tables: tuple[str, ...]) -> Iterator[Plan]:
    """All that is run: with one split there is nothing to merge."""
    known = [Plan("fused", tile=Tile(cache)) for cache in FUSED_PRECISIONS]
    known += [plan for name in tables for plan in TABLES[name].values() if is_fused(plan)]
    for runner, tile in dict.fromkeys((plan.runner, replace(plan.tile, merge="")) for plan in known):
        merges = RUNNERS[runner].choices["merge"]
        for splits in SPLITS:
            for merge in merges if splits > 1 else merges[:1]:
                yield Plan(runner, num_splits=splits, tile=replace(tile, merge=merge))


def draw() -> input_t:
    """Sequences of LENGTHS on the CPU, as custom_kernel's data but for their lengths."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(LENGTHS), NUM_HEADS, QK_HEAD_DIM, generator=generator).bfloat16()
    kv = torch.randn(sum(LENGTHS), 1, QK_HEAD_DIM, generator=generator).bfloat16()
    kv_data = {"bf16": kv, "fp8": quantize_fp8(kv), "mxfp4": quantize_mxfp4(kv)}
    kv_indptr = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    qo_indptr = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    return q, kv_data, qo_indptr, kv_indptr, {"sm_scale": SM_SCALE}


def run(plan: Plan, data: input_t, device: torch.device, target: str) -> torch.Tensor:
    """The output (sequences, 16, 512) bfloat16 of a second run on the same tickets, on the CPU; NaN where nothing was
    written or where the tickets were not left at zero."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    tensors = [q, kv_data["bf16"], *kv_data["fp8"], *kv_data["mxfp4"], qo_indptr, kv_indptr]
    problem = Problem(*(t.to(device) for t in tensors), len(LENGTHS), max(LENGTHS), config["sm_scale"])
    output = torch.empty((len(LENGTHS), NUM_HEADS, V_HEAD_DIM), dtype=torch.bfloat16, device=device)
    clear_caches()
    for _ in range(2):
        output.fill_(torch.nan)
        launches = runner_of(plan).launches(problem, plan, output, target)
        for launch in launches:
            launch.start()
    used = any(launch.arguments["tickets_ptr"].any() for launch in launches if "tickets_ptr" in launch.arguments)
    return torch.full_like(output, torch.nan, device="cpu") if used else output.cpu()


def main() -> int:
    """Run and judge all plans; the exit code. Raises UserError without a GPU."""
    if not torch.cuda.is_available():
        raise UserError("mla sanitize needs a GPU: run it where torch sees one")
    sm_90.install()
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # what is outside a tensor is outside an allocation
    device = torch.device("cuda", torch.cuda.current_device())
    return check(device, "amd" if torch.version.hip else "nvidia", tables_of(device))


def check(device: torch.device, target: str, tables: tuple[str, ...]) -> int:
    """Run and judge all plans; the exit code."""
    data = draw()
    expected = {precision: exact_attention(data, precision) for precision in FUSED_PRECISIONS.values()}
    wrong = 0
    for plan in plans(tables):
        error = worst_of(relative_l2(run(plan, data, device, target), expected[plan.precision]))
        ok = error <= PRECISIONS[plan.precision].kernel_budget
        wrong += not ok
        print(f"{'ok' if ok else 'WRONG':<6} {spec_of(plan)}  {error:.4f}", flush=True)
    print(f"{wrong} plans are wrong" if wrong else "all plans are right")
    return 1 if wrong else 0
