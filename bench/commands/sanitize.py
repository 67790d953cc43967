"""The fused plans on small shapes under a GPU sanitizer: `compute-sanitizer python -m bench.commands.sanitize`.

Every tile of the GPU's own tables and the plain one of each cache format, in several splits, with both merges, on
ragged and empty sequences, twice in a row on the same tickets. The expected outputs are computed on the CPU, so that
next to nothing but our kernels runs on the GPU. Prints "ok" or "WRONG" a plan; exit code 0 if all are ok, 1 if not, 2
without a GPU.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator

import torch

from bench.commands.compare import tables_of
from bench.contest.plans import cache_of, spec_of
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
from submission import FUSED_PRECISIONS, TABLES, Plan, Tile, fused_launches
from task import input_t

LENGTHS = (70, 0, 1, 257, 33)
SPLITS = (1, 3, 8)
MERGES = ("last", "kernel")


def plans(tables: tuple[str, ...]) -> Iterator[Plan]:
    """All that is run: with one split there is nothing to merge."""
    tiles = [Tile(cache) for cache in FUSED_PRECISIONS]
    tiles += [plan.tile for name in tables for plan in TABLES[name].values() if plan.tile]
    variants = dict.fromkeys(dataclasses.replace(tile, merge=merge) for tile in tiles for merge in _merges(tile))
    for tile in variants:
        for splits in SPLITS:
            if splits > 1 or tile.merge == _merges(tile)[0]:
                yield Plan("fused", num_splits=splits, tile=tile)


def _merges(tile: Tile) -> tuple[str, ...]:
    return MERGES if tile.design == "plain" else (tile.merge,)


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
    q, kv_data, _, kv_indptr, config = data
    q, cache, scale, kv_indptr = (t.to(device) for t in (q, *cache_of(kv_data, plan.tile.cache), kv_indptr))
    tickets = torch.zeros(len(LENGTHS), dtype=torch.int32, device=device)
    output = torch.empty((len(LENGTHS), NUM_HEADS, V_HEAD_DIM), dtype=torch.bfloat16, device=device)
    for _ in range(2):
        output.fill_(torch.nan)
        for launch in fused_launches(q, cache, scale, kv_indptr, config["sm_scale"], plan, output, tickets, target):
            launch.start()
    return output.cpu() if not tickets.any() else torch.full_like(output, torch.nan, device="cpu")


def main() -> int:
    if not torch.cuda.is_available():
        print("bench.commands.sanitize needs a GPU: run it where torch sees one", file=sys.stderr)
        return 2
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


if __name__ == "__main__":
    sys.exit(main())
