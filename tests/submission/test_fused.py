"""The fused kernel: compiled for gfx950 and run there, instruction by instruction; on a GPU for real. Plans, tables and
refusals besides. test_fused_interpreted.py has it interpreted, test_wgmma.py the kernel for sm_90."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import submission
from reference import check_exact, generate_input
from submission import InputError, Plan, Tile, custom_kernel, plan_for
from tests.conftest import on_gpu, on_hopper
from tests.ragged import CACHES, RAGGED, Ragged, fused_plan, with_nan

triton = pytest.importorskip("triton", reason="needs Triton: pip install -e '.[gfx950]'")

FUSED = submission.RUNNERS["fused"]
WGMMA = submission.TABLES["sm_90"][4, 1024].tile

# ---- gfx950 machine code ----


@pytest.mark.parametrize(
    ("cache", "lengths", "splits", "merge"),
    [
        *((cache, RAGGED, 1, "last") for cache in CACHES),
        *((cache, [130, 0, 1], 3, "last") for cache in CACHES),
        *((cache, [65, 1], 2, "kernel") for cache in CACHES),
    ],
)
def test_on_gfx950(cache, lengths, splits, merge):
    """The AMD back end's code, twice in a row in shuffled orders: within gate A's budget, nothing for the sanitizer to
    report, and every byte of the cache read exactly once."""
    gfx950 = pytest.importorskip("gfx950", reason="needs the gfx950 extra: pip install -e '.[gfx950]'")
    case = Ragged(lengths, cache, seed=21)
    case.out = case.out.bfloat16()
    for seed in range(2):
        case.out.fill_(torch.nan)
        results = on_gfx950(gfx950, case, fused_plan(cache, splits, merge=merge), seed)
        assert max(case.errors()) < 0.004
        assert not case.tickets.any()
        read = next(b for b in results[0].counters.buffers if b.name == "cache_ptr")
        assert read.bytes_read == read.distinct_bytes_read == read.size


@pytest.mark.parametrize(
    ("cache", "splits", "merge"),
    [
        ("bf16", 2, "last"),
        ("fp8", 2, "last"),
        ("mxfp4", 1, "last"),
        ("mxfp4", 2, "last"),
        ("mxfp4", 2, "kernel"),
        ("mxfp4", 5, "kernel"),
    ],
)
def test_nan_on_gfx950(cache, splits, merge):
    """A NaN in the cache is one in all of its sequence's output, and in no other's."""
    gfx950 = pytest.importorskip("gfx950", reason="needs the gfx950 extra: pip install -e '.[gfx950]'")
    case = with_nan(cache)
    case.out = case.out.bfloat16().fill_(0)
    on_gfx950(gfx950, case, fused_plan(cache, splits, merge=merge), seed=0)
    assert case.out[0].isnan().all()
    assert case.errors()[1] < 0.004


def on_gfx950(gfx950, case: Ragged, plan: Plan, seed: int) -> list:
    """Run the launches; their results, in which the sanitizer found nothing."""
    results = []
    for kernel, grid, arguments, constants, options in case.launches(plan, "amd"):
        fresh = ("out_ptr", "partial_ptr", "lse_ptr") if kernel is submission._fused_kernel else ("out_ptr",)
        args = [gfx950.Uninitialised(a) if name in fresh else a for name, a in arguments.items()]
        results.append(gfx950.run(kernel, grid, args, constexprs=constants, order="shuffled", seed=seed, **options))
        assert results[-1].ok, "\n".join(map(str, results[-1].findings))
    return results


@pytest.mark.parametrize("shape", sorted(submission.GFX950_FUSED_TABLE), ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_the_compiler_for_gfx950_reports_no_trouble(cache, shape):
    """No spills, LDS and registers that fit, bf16 MFMA, 16-byte loads, transposed LDS reads."""
    gfx950 = pytest.importorskip("gfx950", reason="needs the gfx950 extra: pip install -e '.[gfx950]'")
    planned = submission.GFX950_FUSED_TABLE[shape]
    stages = submission.GFX950_FUSED_MXFP4_TABLE[shape].tile.stages if cache == "mxfp4" else planned.tile.stages
    tile = replace(planned.tile, cache=cache, stages=stages)
    plan = replace(planned, tile=tile)
    case = Ragged([64], cache, seed=1)
    case.out = case.out.bfloat16()
    launch = case.launches(plan, "amd")[0]
    code = gfx950.compile(launch.kernel, list(launch.arguments.values()), launch.constants, **launch.options)
    assert code.metadata[".vgpr_spill_count"] == code.metadata[".sgpr_spill_count"] == 0
    assert code.descriptor.scratch_size == 0
    assert code.lds_size <= 160 * 1024
    assert code.metadata[".vgpr_count"] <= 512
    wanted = [r"v_mfma_f32_16x16x32_bf16", r"(global|buffer)_load_(lds_)?dwordx4"]
    if cache == "bf16" or triton.__version__ >= "3.9":  # before, fp8 was converted in its own layout
        wanted.append(r"ds_read_b64_tr_b16")
    for instruction in wanted:
        assert re.search(instruction, code.assembly), instruction


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize(
    ("splits", "merge", "block", "warps"), [(1, "last", 64, 4), (5, "last", 32, 4), (5, "kernel", 64, 8)]
)
@pytest.mark.parametrize("cache", CACHES)
def test_on_a_gpu(cache, splits, merge, block, warps):
    case = Ragged([700, 0, 1, 33, 129], cache, seed=31)
    case.out = case.out.bfloat16()
    case.move_to_gpu()
    target = FUSED.target(case.q.device)
    for _ in range(3):
        case.out.fill_(torch.nan)
        plan = fused_plan(cache, splits, block, merge, warps)
        for launch in case.launches(plan, target):
            launch.start()
        assert max(case.errors()) < 0.004
        assert not case.tickets.any()


@on_gpu
@pytest.mark.parametrize(("splits", "merge"), [(1, "last"), (2, "last"), (2, "kernel"), (5, "kernel")])
@pytest.mark.parametrize("cache", CACHES)
def test_nan_on_a_gpu(cache, splits, merge):
    """A NaN in the cache is one in all of its sequence's output, and in no other's."""
    case = with_nan(cache)
    case.out = case.out.bfloat16().fill_(0)
    case.move_to_gpu()
    for launch in case.launches(fused_plan(cache, splits, merge=merge), FUSED.target(case.q.device)):
        launch.start()
    assert case.out[0].isnan().all()
    assert case.errors()[1] < 0.004


@on_gpu
@pytest.mark.parametrize(
    "table",
    ["sm_90_plain", "gfx950_fused", *(pytest.param(name, marks=on_hopper) for name in ("sm_90", "sm_90_mxfp4"))],
)
@pytest.mark.parametrize("shape", [(4, 1024), (32, 1024), (4, 8192), (3, 777)], ids=str)
def test_the_tables_on_a_gpu(table, shape):
    data = generate_input(shape[0], 1, shape[1], 7)
    plan = plan_for(*shape, table=table)
    assert check_exact(data, custom_kernel(data, plan=plan, strict=True), plan.precision).ok


# ---- Plans ----


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan("fused", num_splits=1), "plan.tile must be given for fused"),
        (Plan("bf16", tile=Tile("bf16")), "plan.tile is for the fused runner and its like, bf16 takes none"),
        (Plan("fused", tile=Tile("fp8")), "plan.num_splits must be 1 … 128 for fused, got None"),
        (fused_plan("fp8", 129), "plan.num_splits must be 1 … 128 for fused, got 129"),
        (Plan("fused", 1, page_size=2, tile=Tile("fp8")), "plan.page_size must be 1 for fused"),
        (fused_plan("fp4", 1), "plan.tile.cache must be one of ('bf16', 'fp8', 'mxfp4') for fused, got 'fp4'"),
        (fused_plan("fp8", 1, block=48), "plan.tile.block must be one of (16, 32, 64, 128) for fused, got 48"),
        (fused_plan("fp8", 1, merge="first"), "plan.tile.merge must be one of"),
        (fused_plan("fp8", 1, warps=3), "plan.tile.warps must be one of"),
        (Plan("wgmma", 1, tile=replace(WGMMA, cache="bf16")), "must be one of ('fp8', 'mxfp4') for wgmma"),
        (Plan("wgmma", 1, tile=replace(WGMMA, merge="last")), "must be one of ('kernel',) for wgmma"),
        (Plan("wgmma", 1, tile=replace(WGMMA, block=32)), "must be one of (64,) for wgmma, got 32"),
    ],
)
def test_plans_that_cannot_be_run_are_refused(plan, says):
    data = generate_input(1, 1, 64, 1, device="cpu")
    with pytest.raises(InputError, match=re.escape(says)):
        custom_kernel(data, plan=plan)


def test_a_tile_is_a_tile():
    with pytest.raises(TypeError, match="tile must be a Tile or None"):
        Plan("fused", num_splits=1, tile="fp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_fused_runner_says_what_to_do():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        custom_kernel(generate_input(1, 1, 64, 1, device="cpu"), plan=fused_plan("bf16", 1))


def test_where_wgmma_cannot_run_it_is_refused(monkeypatch):
    data = generate_input(1, 1, 64, 1, device="cpu")
    with pytest.raises(RuntimeError, match="needs an sm_90 GPU"):
        custom_kernel(data, plan=Plan("wgmma", 1, tile=WGMMA))
    with pytest.raises(ValueError, match="for nvidia and a bfloat16 output, got amd"):
        Ragged([1], "fp8", 1).launches(Plan("wgmma", 1, tile=WGMMA), "amd")


def test_without_triton_the_fused_runner_says_so(monkeypatch):
    monkeypatch.setattr(submission, "triton", None)
    with pytest.raises(RuntimeError, match="needs Triton"):
        custom_kernel(generate_input(1, 1, 64, 1, device="cpu"), plan=fused_plan("bf16", 1))


@pytest.mark.parametrize("table", [name for name in submission.TABLES if name not in ("gfx950", "v50")])
@pytest.mark.parametrize("shape", [(1, 1), (3, 777), (256, 8192), (300, 40), (1, 100_000)], ids=str)
def test_every_shape_has_a_legal_fused_plan(table, shape):
    plan = plan_for(*shape, table=table)
    submission.check_plan(plan, shape[1])
    assert plan.num_splits <= max(1, -(-shape[1] // plan.tile.block))
    assert submission.explain(*shape, table=table).precision == submission.FUSED_PRECISIONS[plan.tile.cache]


@pytest.mark.parametrize(
    ("hip", "properties", "table"),
    [
        (None, {"major": 9, "minor": 0, "gcnArchName": "NVIDIA H200"}, "sm_90"),
        (None, {"major": 8, "minor": 0, "gcnArchName": "NVIDIA A100"}, "gfx950"),
        ("7.0", {"major": 9, "minor": 5, "gcnArchName": "gfx950:sramecc+:xnack-"}, "gfx950"),
    ],
)
def test_the_table_follows_the_architecture(monkeypatch, hip, properties, table):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    submission._arch_of.cache_clear()
    assert submission.table_of(torch.device("cuda", 0)) == table
    submission._arch_of.cache_clear()


@pytest.mark.parametrize(
    ("runner", "tile", "splits", "launched"),
    [
        ("fused", Tile("fp8"), 4, 1),
        ("fused", Tile("fp8", merge="kernel"), 4, 2),
        ("fused", Tile("fp8", merge="kernel"), 1, 1),
        ("wgmma", WGMMA, 4, 2),
        ("wgmma", WGMMA, 1, 1),
    ],
)
def test_the_launches_are_those_explained(runner, tile, splits, launched):
    plan, case = Plan(runner, splits, tile=tile), Ragged([64], "fp8", 1)
    case.out = case.out.bfloat16()
    kernels = [launch.kernel.__name__ for launch in case.launches(plan, "nvidia")]
    assert kernels == list(submission.RUNNERS[runner].kernels(plan))
    assert len(kernels) == launched


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 300),
    length=st.integers(1, 9000),
    cache=st.sampled_from(CACHES),
    splits=st.integers(-1, 140),
    merge=st.sampled_from(["last", "kernel"]),
    target=st.sampled_from(["nvidia", "amd", "interpreter"]),
)
def test_any_plan_has_room_for_all_its_parts_or_is_clearly_refused(batch, length, cache, splits, merge, target):
    """By its launches, on tensors without memory; test_fused_interpreted.py and a GPU have the numbers."""
    plan = fused_plan(cache, splits, merge=merge)
    if not 1 <= splits <= 128:
        with pytest.raises(InputError, match=r"plan.num_splits must be 1 … 128 for fused"):
            submission.check_plan(plan, length)
        return
    submission.check_plan(plan, length)
    meta = torch.device("meta")

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    rows, bytes_per_row = batch * length, {"bf16": 576, "fp8": 576, "mxfp4": 288}[cache]
    values = empty(rows, 1, bytes_per_row, dtype=torch.bfloat16 if cache == "bf16" else torch.uint8)
    indptr = empty(batch + 1, dtype=torch.int32)
    q = empty(batch, 16, 576, dtype=torch.bfloat16)
    caches = [values, values, empty(1, dtype=torch.float32), values, empty(rows, 18)]
    problem = submission.Problem(q, *caches, indptr, indptr, batch, length, 1 / 24)
    output = empty(batch, 16, 512, dtype=torch.bfloat16)
    first, *merging = FUSED.launches(problem, plan, output, target)
    assert first.grid == (splits, batch)
    assert {a.device for a in first.arguments.values() if isinstance(a, torch.Tensor)} == {meta}
    parts = 0 if splits == 1 else splits * batch
    assert first.arguments["partial_ptr"].numel() == parts * 16 * 512
    assert first.arguments["lse_ptr"].numel() == parts * 16
    assert bool(merging) == (merge == "kernel" and splits > 1)
    for launch in merging:
        assert launch.grid == (16, batch)
        assert min(splits, 32) <= launch.constants["PARTS"] <= 32
        assert all(launch.arguments[name] is first.arguments[name] for name in ("partial_ptr", "lse_ptr", "out_ptr"))
