"""Who takes part: our tables' and spaces' plans for a shape, and the peers; all compiled ahead, side by side."""

import contextlib
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.contest import peers
from bench.contest.plans import Space, is_fused
from bench.contest.rounds import OURS, PEER, Contestant
from bench.environment import processors_of
from bench.versions import version
from reference import generate_input
from submission import TABLES, Plan, check_input, custom_kernel, plan_for, runner_of, table_of
from task import TestSpec


def tables_of(device: torch.device) -> tuple[str, ...]:
    """The device's own table and those named after it, such as sm_90 and sm_90_mxfp4."""
    own = table_of(device)
    return tuple(name for name in TABLES if name.startswith(own))


def ours(args: TestSpec, tables: Sequence[str], spaces: Sequence[Space], device: torch.device) -> list[Contestant]:
    """Our contestants on a shape: the plan of each table, then the plans of each space."""
    shape = args["batchsize"], args["kvseqlen"]
    found = [_of_plan(f"table {table}", plan_for(*shape, table=table), table=table) for table in tables]
    for space in spaces:
        plans = space.plans(*shape, processors_of(device))
        found += [_of_plan(f"plans {space.text}", plan, may_fail=len(plans) > 1) for plan in plans]
    return found


def _of_plan(name: str, plan: Plan, **options: Any) -> Contestant:
    # Whoever names a table with larger pages wants to see what it does.
    call = functools.partial(custom_kernel, plan=plan, kernels_honour_page_size=plan.page_size > 1)
    return Contestant(name, OURS, plan.precision, "", lambda data: lambda data: call, plan=plan, **options)


def compiled(chosen: Sequence[peers.Peer], plans: Sequence[Plan], device: torch.device) -> list[Contestant]:
    """Compile the peers and our plans side by side, and return the peers as contestants. What fails to compile shows
    its error when it is called."""
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(peers.build, chosen)
        with contextlib.suppress(Exception):
            compile_plans([plan for plan in plans if is_fused(plan)], device)
        return [_of_peer(peer) for peer in built.result()]


def _of_peer(peer: peers.Peer) -> Contestant:
    return Contestant(peer.name, PEER, peer.precision, f"{peer.package} {version(peer.package)}", peer.start)


def compile_plans(plans: Sequence[Plan], device: torch.device) -> None:
    """Triton's part, for any shape: a kernel's code depends on the tile, and on splits as far as they are merged."""
    from triton import AsyncCompileMode

    problem = check_input(generate_input(1, 1, 32, 0, device=device))
    output = torch.empty((1, 16, 512), dtype=torch.bfloat16, device=device)
    target = "amd" if torch.version.hip else "nvidia"
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for plan in plans:
            with contextlib.suppress(Exception):
                for kernel, grid, arguments, constants, options in runner_of(plan).launches(
                    problem, plan, output, target
                ):
                    kernel.warmup(grid=grid, **arguments, **constants, **options)
