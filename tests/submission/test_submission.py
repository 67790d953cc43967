"""submission.py: every runner exact, the tables legal, warm calls bare, and wrong input refused before any launch."""

import ast
import contextlib
import inspect
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import submission
from bench.basics import PROJECT_ROOT, PROJECT_SUBMISSION
from bench.worker.subject import overwrite
from reference import check_exact, check_implementation, exact_attention, generate_input, pack_input
from submission import (
    GFX950_TABLE,
    RUNNERS,
    TABLES,
    V50_TABLE,
    AiterRunner,
    InputError,
    PersistentRunner,
    Plan,
    custom_kernel,
    explain,
    persistent_splits,
    plan_for,
)
from task import BENCHMARKS
from tests.conftest import on_gpu, on_portable
from tests.plans import ON_AITER, name_of

import aiter  # isort: skip (reference has chosen it)

SHAPES = [(case["batchsize"], case["kvseqlen"]) for case in BENCHMARKS]
RUNNERS_ON_AITER = [
    name for name, runner in RUNNERS.items() if isinstance(runner, AiterRunner)
]  # test_fused.py has the others


def _judge(data, plan: Plan | None = None, **options):
    output = custom_kernel(data, plan=plan, strict=True)
    batch, length = data[4]["batch_size"], data[4]["kv_seq_len"]
    return check_exact(data, output, (plan or plan_for(batch, length, device=data[0].device)).precision, **options)


# ---- Exact ----


def test_every_runner_is_planned_here():
    assert {plan.runner for plan in ON_AITER} == set(RUNNERS_ON_AITER)


@pytest.mark.parametrize(("batch", "length"), [(4, 397), (32, 200), (32, 397), (64, 397), (256, 200)])
@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_every_runner_at_every_benchmark_batch(plan, batch, length):
    verdict = _judge(generate_input(batch, 1, length, batch + length), plan)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("shape", [(4, 1024), (32, 1024), (64, 1024), (4, 8192)])
def test_benchmark_shapes_whole(shape):
    data = generate_input(shape[0], 1, shape[1], 31)
    verdict = _judge(data)
    assert verdict.ok, verdict.message
    assert check_implementation(data, custom_kernel(data))[0]


@pytest.mark.parametrize("length", [1, 3, 17, 63, 64, 65, 195, 196, 1023, 2914])
@pytest.mark.parametrize("batch", [1, 5, 48, 100])
def test_shapes_off_the_table(batch, length):
    verdict = _judge(generate_input(batch, 1, length, length))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_a_needle_counts_wherever_it_is(plan):
    """One token with nearly all the weight, at tile, split and sequence edges; gate B does not speak of such data."""
    length, batch = 800, 3
    clean = generate_input(batch, 1, length, 12)
    for position in (0, 1, 63, 64, 127, 128, 207, 208, 399, 400, 655, 656, 798, 799):
        for sequence in (0, batch - 1):
            data = _with_needle(clean, sequence, position)
            verdict = _judge(data, plan, standard_normal=False)
            assert verdict.ok, (sequence, position, verdict.message)
            weight = _weight_of(data, sequence, position)
            assert weight > 0.9, "the needle must carry the answer, else this test shows nothing"


def _with_needle(data, sequence: int, position: int):
    q, kv_data, *rest = data
    length = data[4]["kv_seq_len"]
    cache = kv_data["bf16"].clone()
    cache[sequence * length + position, 0] = q[sequence, 5] * 0.6
    fp8, scale = kv_data["fp8"]
    fp8 = fp8.clone()
    fp8[sequence * length + position, 0] = (q[sequence, 5].float() * 0.6 / scale).to(fp8.dtype)
    return (q, {**kv_data, "bf16": cache, "fp8": (fp8, scale)}, *rest)


def _weight_of(data, sequence: int, position: int) -> float:
    q, kv_data, *_, config = data
    length = config["kv_seq_len"]
    keys = kv_data["bf16"][sequence * length : (sequence + 1) * length, 0].float()
    return torch.softmax(keys @ q[sequence, 5].float() / 24, 0)[position].item()


@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_rows_beyond_the_cache_are_never_read(plan):
    data = generate_input(3, 1, 400, 4)
    alone = custom_kernel(data, plan=plan)
    kv_data = data[1]
    poisoned = {
        "bf16": _surrounded(kv_data["bf16"], torch.nan),
        "fp8": (_surrounded(kv_data["fp8"][0], torch.nan), kv_data["fp8"][1]),
        "mxfp4": kv_data["mxfp4"],
    }
    assert torch.equal(custom_kernel((data[0], poisoned, *data[2:]), plan=plan, strict=True), alone)


def _surrounded(cache: torch.Tensor, value: float) -> torch.Tensor:
    """The same rows as a slice of larger storage that is filled with `value`."""
    storage = torch.full((cache.shape[0] + 512, *cache.shape[1:]), value, device=cache.device).to(cache.dtype)
    storage[256:-256] = cache
    return storage[256:-256]


@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_calls_do_not_touch_their_inputs_or_each_other(plan):
    first, second = generate_input(2, 1, 400, 1), generate_input(2, 1, 400, 2)
    before = [t.clone() for t in (first[0], first[1]["bf16"], first[1]["fp8"][0].view(torch.uint8), first[3])]
    one = custom_kernel(first, plan=plan)
    kept = one.clone()
    two = custom_kernel(second, plan=plan)
    assert one.data_ptr() != two.data_ptr()
    assert torch.equal(one, kept)
    assert not torch.equal(one, two)
    after = (first[0], first[1]["bf16"], first[1]["fp8"][0].view(torch.uint8), first[3])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_portable
@settings(max_examples=60, deadline=None)
@given(runner=st.sampled_from(RUNNERS_ON_AITER), batch=st.integers(1, 300), length=st.integers(1, 9000), data=st.data())
def test_any_plan_is_exact_or_clearly_refused(runner, batch, length, data):
    """Every runner over all shapes, with any number of splits; computed where that is cheap."""
    splits = data.draw(st.none() | st.integers(-1, 40), label="splits")
    plan = Plan(runner, splits)
    refusal = _refusal(plan, length)
    if refusal:
        assert "plan.num_splits" in refusal or "needs 196 pages" in refusal
    elif batch * length <= 65_536:
        verdict = _judge(generate_input(batch, 1, length, batch * length), plan)
        assert verdict.ok, verdict.message


def _refusal(plan: Plan, length: int) -> str | None:
    try:
        submission.check_plan(plan, length)
    except InputError as error:
        return str(error)
    return None


# ---- The range of the runners that cast q to fp8 ----

CASTING = [plan for plan in ON_AITER if plan.precision == "a8w8"]


@pytest.fixture(params=["as torch casts", "saturating", "to NaN"])
def cast(request, monkeypatch):
    """torch's cast to e4m3fn beyond 464: to NaN up to 2.11, to 448 in 2.13; both, whatever torch is here."""
    original = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if args[:1] != (submission.FP8,):
            return original(tensor, *args, **kwargs)
        beyond = tensor.abs() > 464
        instead = 448.0 * tensor.sign() if request.param == "saturating" else torch.nan
        return original(torch.where(beyond, instead, tensor.clamp(-448, 448)), submission.FP8)

    if request.param != "as torch casts":
        monkeypatch.setattr(torch.Tensor, "to", to)
    return request.param


@pytest.mark.parametrize("plan", CASTING, ids=name_of)
@pytest.mark.parametrize("largest", [448.0, 464.0])
def test_up_to_464_the_cast_gives_448(plan, largest, cast):
    """464 is the last value that every torch rounds to 448; strict mode stops at 448 itself."""
    q, *rest = generate_input(2, 1, 400, 3)
    q = q.clone()
    q[0, 0, 0] = largest
    output = custom_kernel((q, *rest), plan=plan)
    q[0, 0, 0] = 448.0
    assert torch.equal(output, custom_kernel((q, *rest), plan=plan, strict=True))


@pytest.mark.parametrize("plan", CASTING, ids=name_of)
def test_beyond_464_torch_saturates_or_gives_nan_and_strict_mode_refuses(plan, cast):
    q, *rest = generate_input(2, 1, 400, 3)
    q = q.clone()
    q[1, 3, 5] = 480.0
    with pytest.raises(InputError, match=r"holds \|q\| ≤ 448; this q goes beyond"):
        custom_kernel((q, *rest), plan=plan, strict=True)
    output = custom_kernel((q, *rest), plan=plan)
    q[1, 3, 5] = 448.0
    saturated = custom_kernel((q, *rest), plan=plan)
    rows = output[1, 3]
    kept, lost = torch.equal(rows, saturated[1, 3]), bool(torch.isnan(rows).all())
    assert (kept, lost) in {"saturating": [(True, False)], "to NaN": [(False, True)]}.get(
        cast, [(True, False), (False, True)]
    )
    assert torch.equal(output[0], saturated[0])


@pytest.mark.parametrize("plan", [Plan("bf16"), Plan("a16w8_persistent", 2)], ids=name_of)
def test_runners_that_do_not_cast_take_any_q(plan):
    q, *rest = generate_input(2, 1, 400, 3)
    assert _judge((q * 200, *rest), plan, standard_normal=False).ok


@on_portable
def test_fp8_probabilities_lose_a_flat_tail():
    """The known limit of AMD's a8w8 kernels: one peak, and tokens 2^-11 below it that together outweigh it."""
    q, kv_data, *_ = generate_input(1, 1, 8192, 3)
    kv = (kv_data["bf16"] * 0.001).contiguous()
    kv[:, 0, 0] = 1.0  # a common value, so that the tail is more than noise
    kv[4000, 0] = q[0].float().mean(0).bfloat16() * 0
    kv[4000, 0, 0] = 1.0 + 24 * 7.7 / 8
    q = torch.zeros_like(q)
    q[..., 0] = 8.0
    data = pack_input(q, kv, 1)
    assert _judge(data, Plan("a16w8_persistent", 1), standard_normal=False).ok
    assert not _judge(data, Plan("a8w8_persistent", 1), standard_normal=False).ok


# ---- Large caches, graphs, several GPUs: more in test_on_gpu.py ----


@on_gpu
@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_offsets_beyond_4_gib(plan):
    """4.9 GB of bf16 cache: a 32-bit byte offset wraps at 2 and at 4 GiB."""
    batch, length = 64, 66_560
    data = generate_input(batch, 1, length, 2)
    assert data[1]["bf16"].numel() * 2 > 2**32
    if plan.runner == "bf16" and not torch.version.hip:
        with pytest.raises(ValueError, match="wrap at 4 GiB"):  # as AMD's kernel's do, which does not say so
            custom_kernel(data, plan=plan)
        return
    verdict = _judge(data, plan)
    assert verdict.ok, verdict.message


@on_gpu
@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_a_graph_replays_on_new_values(plan, monkeypatch):
    """Our side of a warm call can be captured; plain attention on the GPU stands in for AMD's kernels."""

    def decode(q, kv, output, *_, kv_scale=None, sm_scale=None, **__):
        keys = kv.view(torch.uint8).view(kv.dtype).float().view(q.shape[0], -1, 576) * (
            1 if kv_scale is None else kv_scale
        )
        weights = torch.softmax(q.float() @ keys.transpose(1, 2) * sm_scale, -1)
        output.copy_(weights @ keys[..., :512])

    decode.__signature__ = inspect.signature(aiter.mla.mla_decode_fwd)
    monkeypatch.setattr(aiter.mla, "mla_decode_fwd", decode)
    data = generate_input(4, 1, 400, 1)
    custom_kernel(data, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = custom_kernel(data, plan=plan)
    for seed in (2, 1):
        overwrite(data, generate_input(4, 1, 400, seed))
        graph.replay()
        assert torch.equal(output, custom_kernel(data, plan=plan))
        assert check_exact(data, output, plan.precision).ok


@on_gpu
@on_portable
def test_the_portable_aiter_says_why_it_cannot_be_captured():
    data = generate_input(4, 1, 400, 1)
    custom_kernel(data, plan=Plan("bf16"))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="cannot be captured in a graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        custom_kernel(data, plan=Plan("bf16"))


@pytest.mark.parametrize("make", submission._CACHES, ids=lambda make: make.__name__)
def test_nothing_is_kept_from_a_capture(make, monkeypatch):
    monkeypatch.setattr(submission, "_graph_is_captured", lambda: True)
    gpu = torch.device("cuda")
    keys = {"_page_indices": (8,), "_indptr": (2, 8), "_last_page_lens": (2, 1), "_unit_scale": (), "_tickets": (2,)}
    lists = (2, 400, 1, 1, torch.bfloat16)
    with pytest.raises(RuntimeError, match="call custom_kernel once with this shape and plan, then capture"):
        make(*keys.get(make.__name__, lists), gpu)
    assert make.cache_info().currsize == 0


def test_the_tensors_gpu_is_made_current(monkeypatch):
    """What a test in test_on_gpu.py needs two GPUs for, with the calls counted instead."""
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())

    class OnGpu:
        is_cuda = True

        def __init__(self, index):
            self.device = torch.device("cuda", index)

    with submission._on_device_of(OnGpu(0)), submission._on_device_of(OnGpu(1)):
        pass
    assert entered == [torch.device("cuda", 1)]


# ---- Tables and lookup ----


def test_the_default_table_has_every_benchmark_shape_at_page_size_one():
    assert set(GFX950_TABLE) == set(V50_TABLE) == set(SHAPES)
    assert all(plan.page_size == 1 for plan in GFX950_TABLE.values())
    for shape in SHAPES:
        assert plan_for(*shape) == GFX950_TABLE[shape]
        assert explain(*shape).why == f"entry {shape} of table gfx950"


@pytest.mark.parametrize("shape", SHAPES)
def test_persistent_entries_ask_for_the_splits_they_get(shape):
    """More would make every buffer of splits larger than what is used."""
    plan = GFX950_TABLE[shape]
    if isinstance(RUNNERS[plan.runner], PersistentRunner):
        made = _splits_made(*shape, plan.num_splits)
        assert plan.num_splits == made, f"entry {shape} asks for {plan.num_splits} splits and gets {made}"


@pytest.mark.parametrize("shape", [*SHAPES, (1, 2914), (1, 2916), (1, 2917)])
def test_the_rule_s_splits_are_made(shape):
    """At 2914 and 2916 a tail of 2 and 4 tokens joins the part before, at 2917 one of 5 does not."""
    assert _splits_made(*shape, persistent_splits(*shape)) == persistent_splits(*shape)


def _splits_made(batch: int, length: int, num_splits: int) -> int:
    """How many parts a sequence gets from get_mla_metadata_v1."""
    lists = submission._work_lists(batch, length, num_splits, 1, torch.bfloat16, torch.device("cpu"))
    return int(lists["work_indptr"][-1]) // batch


@on_portable
@settings(max_examples=300, deadline=None)
@given(batch=st.integers(1, 300), length=st.integers(1, 9000), table=st.sampled_from(list(TABLES)))
def test_every_shape_gets_a_legal_plan(batch, length, table):
    plan = plan_for(batch, length, table=table)
    submission.check_plan(plan, length, True)
    if table == "gfx950":
        submission.check_plan(plan, length)
        if isinstance(RUNNERS[plan.runner], PersistentRunner) and (batch, length) not in GFX950_TABLE:
            assert _splits_made(batch, length, plan.num_splits) == plan.num_splits


@pytest.mark.parametrize(
    ("shape", "runner"),
    [
        ((256, 195), "bf16"),
        ((256, 196), "a16w8_persistent"),
        ((300, 9000), "a8w8_persistent"),
        ((1, 1), "bf16"),
        ((100, 700), "fp8_nonpersistent"),
    ],
)
def test_the_rule_between_entries(shape, runner):
    assert plan_for(*shape).runner == runner
    assert "no entry in table gfx950" in explain(*shape).why


def test_ties_go_to_the_smaller_batch_then_the_shorter_length():
    """(128, 1024) is as far from (64, 1024) as from (256, 1024); (64, 2896) all but as far from 1024 as from 8192."""
    assert plan_for(128, 1024).runner == GFX950_TABLE[64, 1024].runner
    assert plan_for(64, 2896).runner == GFX950_TABLE[64, 1024].runner
    assert plan_for(64, 2897).runner == GFX950_TABLE[64, 8192].runner


def test_a_wrong_entry_is_named_when_it_is_looked_up(monkeypatch):
    for entry, message in (
        (Plan("a4w4"), "plan.runner 'a4w4' is unknown, expected one of bf16"),
        (Plan("a8w8_persistent", 0), "plan.num_splits must be 1 … 64"),
        (Plan("bf16", page_size=2), "plan.page_size must be 1 for bf16"),
    ):
        monkeypatch.setitem(GFX950_TABLE, (4, 1024), entry)
        submission._find.cache_clear()
        with pytest.raises(InputError, match=message):
            explain(4, 1024)
    monkeypatch.setitem(GFX950_TABLE, (4, 1024), Plan("a4w4"))
    with pytest.raises(InputError, match="is unknown"):
        plan_for(5, 1000)
    monkeypatch.undo()
    submission._find.cache_clear()


def test_a_plan_is_a_plan():
    with pytest.raises(InputError, match="plan must be a Plan or None, got str: 'bf16'"):
        custom_kernel(generate_input(1, 1, 64, 1, device="cpu"), plan="bf16")


@pytest.mark.parametrize(
    "numbers", [{"num_splits": 4.0}, {"num_splits": "4"}, {"num_splits": True}, {"page_size": 1.0}]
)
def test_plans_hold_whole_numbers(numbers):
    with pytest.raises(TypeError, match="page_size must be an int and num_splits an int or None"):
        Plan("bf16", **numbers)


def test_lookup_refusals():
    with pytest.raises(ValueError, match=r"unknown table 'v51', expected one of gfx950, .*v50"):
        plan_for(4, 1024, table="v51")
    for shape in ((0, 5), (5, 0), (-1, 5)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            explain(*shape)


def test_explain_names_what_is_read_and_launched():
    explanation = explain(64, 1024)
    assert explanation.precision == "a8w8"
    assert explanation.kernels == ("q cast to float8_e4m3fn", "mla_a8w8_qh16_qseqlen1_gqaratio16")
    assert explain(4, 8192).kernels[-1] == "_fwd_kernel_stage2_asm"


# ---- Page sizes above 1 ----


@pytest.mark.parametrize("shape", [s for s in SHAPES if V50_TABLE[s].page_size > 1])
def test_v50_pages_are_refused_unless_vouched_for(shape):
    data = generate_input(2, 1, 2048, 3)
    with pytest.raises(InputError, match="read only the first token"):
        custom_kernel(data, plan=V50_TABLE[shape])


def test_a_table_entry_with_pages_is_refused_too(monkeypatch):
    monkeypatch.setitem(GFX950_TABLE, (2, 2048), Plan("a16w8_persistent", 1, page_size=2))
    submission._find.cache_clear()
    with pytest.raises(InputError, match="Use page_size 1"):
        custom_kernel(generate_input(2, 1, 2048, 3, device="cpu"))
    submission._find.cache_clear()


@on_portable
def test_v50_passes_the_official_check_and_fails_the_exact_one():
    data = generate_input(4, 1, 8192, 2)
    with pytest.warns(aiter.mla.PagingWarning, match="1/8 of the cache"):
        output = custom_kernel(data, plan=V50_TABLE[4, 8192], kernels_honour_page_size=True)
    assert check_implementation(data, output)[0]
    verdict = check_exact(data, output)
    assert not verdict.ok
    assert verdict.kernel_error > 0.5


@on_portable
def test_pages_are_right_where_they_are_honoured():
    data = generate_input(3, 1, 2048, 2)
    with aiter.settings.using(documented_paging=True):
        output = custom_kernel(data, plan=Plan("a16w8_persistent", 1, page_size=8), kernels_honour_page_size=True)
    assert check_exact(data, output, "a16w8").ok


# ---- Caches and warm calls ----


class _Operators(TorchDispatchMode):
    """Records the torch operators issued within the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recorder(monkeypatch):
    """Stands in mla_decode_fwd's place and keeps what it was called with; launches nothing."""
    calls = []
    original = aiter.mla.mla_decode_fwd

    def record(*args, **kwargs):
        calls.append((args, kwargs))

    record.__signature__ = inspect.signature(original)
    monkeypatch.setattr(aiter.mla, "mla_decode_fwd", record)
    return calls


@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_a_warm_call_issues_views_an_allocation_and_the_cast(plan, recorder):
    data = generate_input(4, 1, 1024, 0)
    custom_kernel(data, plan=plan)
    with _Operators() as operators:
        custom_kernel(data, plan=plan)
    expected = ["empty", "view"]
    if plan.precision == "a8w8":
        expected.insert(1, "_to_copy")
    assert operators.names == expected
    assert len(recorder) == 2


def test_kept_tensors_follow_every_part_of_their_key():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert submission._page_indices(8, cpu) is submission._page_indices(8, cpu)
    assert submission._page_indices(8, meta).device == meta
    assert submission._page_indices(9, cpu).tolist() == list(range(9))
    assert submission._indptr(3, 7, cpu).tolist() == [0, 7, 14, 21]
    assert submission._last_page_lens(2, 8, cpu).tolist() == [8, 8]
    assert submission._unit_scale(cpu).tolist() == [1.0]
    assert submission._tickets(3, cpu).tolist() == [0, 0, 0]
    for made in (
        submission._indptr(3, 7, meta),
        submission._last_page_lens(2, 8, meta),
        submission._unit_scale(meta),
        submission._tickets(3, meta),
    ):
        assert made.device == meta
    key = (4, 1024, 5, 1, torch.bfloat16, cpu)
    lists = submission._work_lists(*key)
    assert submission._work_lists(*key) is lists
    with pytest.raises(RuntimeError):  # made anew for another device, here one without values
        submission._work_lists(*key[:-1], meta)
    for changed in ((5, *key[1:]), (4, 2048, *key[2:]), (4, 1024, 4, *key[3:]), (*key[:4], submission.FP8, *key[5:])):
        assert submission._work_lists(*changed) is not lists


@pytest.mark.parametrize(
    ("plan", "q_dtype"), [(Plan("a16w8_persistent", 2), torch.bfloat16), (Plan("a8w8_persistent", 2), submission.FP8)]
)
def test_the_metadata_is_told_what_q_and_cache_are(plan, q_dtype, recorder, monkeypatch):
    """Left out, the real one guesses: a fault that was reported of others."""
    told = []
    info, metadata = aiter.get_mla_metadata_info_v1, aiter.get_mla_metadata_v1
    monkeypatch.setattr(aiter, "get_mla_metadata_info_v1", lambda *a, **k: told.append(a[3:5]) or info(*a, **k))
    monkeypatch.setattr(
        aiter, "get_mla_metadata_v1", lambda *a, **k: told.append((k["dtype_q"], k["dtype_kv"])) or metadata(*a, **k)
    )
    custom_kernel(generate_input(2, 1, 400, 0), plan=plan)
    assert told == [(q_dtype, submission.FP8)] * 2
    assert recorder[0][0][0].dtype == q_dtype


def test_caches_are_bounded_and_can_be_emptied():
    for pages in range(1, 3 * submission._KEPT):
        submission._page_indices(pages, torch.device("cpu"))
    assert submission._page_indices.cache_info().currsize == submission._KEPT
    custom_kernel(generate_input(2, 1, 400, 0), plan=Plan("a8w8_persistent", 2))
    submission.clear_caches()
    assert all(cache.cache_info().currsize == 0 for cache in submission._CACHES)


def test_an_evicted_shape_comes_back_right():
    shapes = [(2, 196 + i) for i in range(submission._KEPT + 3)]
    for batch, length in [*shapes, shapes[0]]:
        plan = Plan("a16w8_persistent", 1)
        assert _judge(generate_input(batch, 1, length, length), plan).ok


# ---- Refusals, before any launch ----


def _data(**changes):
    q, kv_data, qo_indptr, kv_indptr, config = generate_input(2, 1, 64, 0, device="cpu")
    parts = {"q": q, "kv_data": dict(kv_data), "qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "config": dict(config)}
    for name, change in changes.items():
        if name in parts:
            parts[name] = change(parts[name])
        elif name in kv_data:
            parts["kv_data"][name] = change(kv_data[name])
        else:
            parts["config"][name] = change
    return tuple(parts.values())


def _without(name):
    return lambda mapping: {key: value for key, value in mapping.items() if key != name}


def _renamed(old, new):
    return lambda mapping: {new if key == old else key: value for key, value in mapping.items()}


def _strided(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


META = torch.device("meta")
REFUSED = {
    "fp8 missing": (
        _data(kv_data=_without("fp8")),
        "kv_data must be a dict with 'bf16', 'fp8' and 'mxfp4', got 'bf16'",
    ),
    "fp8 misspelt": (_data(kv_data=_renamed("fp8", "FP8")), "got 'bf16', 'FP8', 'mxfp4'"),
    "kv_data a tuple": (_data(kv_data=lambda d: tuple(d.values())), "kv_data must be a dict"),
    "q of rank 2": (_data(q=lambda t: t.flatten(0, 1)), "q must have shape (2, 16, 576)"),
    "q with 8 heads": (_data(q=lambda t: t[:, :8].contiguous()), "q must have shape (2, 16, 576)"),
    "q with 512 dims": (_data(q=lambda t: t[..., :512].contiguous()), "q must have shape (2, 16, 576)"),
    "q float32": (_data(q=lambda t: t.float()), "q must be torch.bfloat16, got torch.float32"),
    "q a list": (_data(q=lambda t: t.tolist()), "q must be a tensor, got list"),
    "q strided": (_data(q=_strided), "q is not contiguous: pass q.contiguous()"),
    "bf16 with too few rows": (_data(bf16=lambda t: t[:-1]), "kv_data['bf16'] must have shape (128, 1, 576)"),
    "bf16 of rank 2": (_data(bf16=lambda t: t[:, 0]), "kv_data['bf16'] must have shape"),
    "bf16 as float16": (_data(bf16=lambda t: t.half()), "kv_data['bf16'] must be torch.bfloat16"),
    "bf16 strided": (_data(bf16=_strided), "kv_data['bf16'] is not contiguous"),
    "bf16 elsewhere": (_data(bf16=lambda t: t.to(META)), "kv_data['bf16'] is on meta, q on cpu"),
    "fp8 without scale": (_data(fp8=lambda p: p[0]), "kv_data['fp8'] must be a pair (values, scale), got Tensor"),
    "fp8 as fnuz": (
        _data(fp8=lambda p: (p[0].view(torch.float8_e4m3fnuz), p[1])),
        "older GPUs (gfx942), which the gfx950 kernels misread",
    ),
    "fp8 strided": (
        _data(fp8=lambda p: (_strided(p[0].view(torch.uint8)).view(p[0].dtype), p[1])),
        "kv_data['fp8'][0] is not contiguous",
    ),
    "fp8 elsewhere": (_data(fp8=lambda p: (p[0].to(META), p[1])), "kv_data['fp8'][0] is on meta"),
    "scale a scalar": (_data(fp8=lambda p: (p[0], p[1][0])), "the scale, must have shape (1,) for this config, got ()"),
    "scale a row": (_data(fp8=lambda p: (p[0], p[1].repeat(2))), "the scale, must have shape (1,)"),
    "scale bfloat16": (_data(fp8=lambda p: (p[0], p[1].bfloat16())), "the scale, must be torch.float32"),
    "scale elsewhere": (_data(fp8=lambda p: (p[0], p[1].to(META))), "the scale, is on meta"),
    "mxfp4 unpacked": (_data(mxfp4=lambda p: (p[0].view(torch.uint8).repeat(1, 1, 2), p[1])), "(128, 1, 288)"),
    "mxfp4 scales short": (_data(mxfp4=lambda p: (p[0], p[1][:100])), "(128 or more, 18 or more), got (100, 18)"),
    "mxfp4 scales float": (_data(mxfp4=lambda p: (p[0], p[1].float())), "the scales, must be torch.float8_e8m0fnu"),
    "qo_indptr short": (_data(qo_indptr=lambda t: t[:-1]), "qo_indptr must have shape (3,)"),
    "qo_indptr long": (_data(qo_indptr=lambda t: t.long()), "qo_indptr must be torch.int32, got torch.int64"),
    "kv_indptr short": (_data(kv_indptr=lambda t: t[1:]), "kv_indptr must have shape (3,)"),
    "kv_indptr float": (_data(kv_indptr=lambda t: t.float()), "kv_indptr must be torch.int32"),
    "kv_indptr elsewhere": (_data(kv_indptr=lambda t: t.to(META)), "kv_indptr is on meta"),
    "two query tokens": (_data(q_seq_len=2), "config['q_seq_len'] must be 1, got 2"),
    "128 heads": (_data(num_heads=128), "config['num_heads'] must be 16, got 128"),
    "batch of 0": (_data(batch_size=0), "config['batch_size'] must be an int of 1 or more, got 0"),
    "batch a float": (_data(batch_size=2.0), "config['batch_size'] must be an int of 1 or more, got 2.0"),
    "length of 0": (_data(kv_seq_len=0), "config['kv_seq_len'] must be an int of 1 or more, got 0"),
    "length negative": (_data(kv_seq_len=-5), "config['kv_seq_len'] must be an int"),
    "length wrong": (_data(kv_seq_len=63), "must have shape (126, 1, 576)"),
    "too many rows": (_data(kv_seq_len=2**30), "more than the 32-bit indices"),
    "sm_scale NaN": (_data(sm_scale=float("nan")), "config['sm_scale'] must be a finite float"),
    "config short": (_data(config=_without("num_heads")), "config lacks 'num_heads'"),
    "config None": (_data(config=lambda c: None), "config must be a dict, got NoneType"),
    "four parts": (_data()[:4], "data must be the tuple (q, kv_data, qo_indptr, kv_indptr, config)"),
    "a list": (list(_data()), "data must be the tuple"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_data_is_refused_before_any_launch(name, recorder):
    data, message = REFUSED[name]
    with pytest.raises(InputError) as caught, _Operators() as operators:
        custom_kernel(data)
    assert message in str(caught.value)
    assert not recorder
    assert not operators.names


def test_the_well_formed_twin_is_taken(recorder):
    custom_kernel(_data())
    assert len(recorder) == 1


def test_both_scale_layouts_of_mxfp4_are_taken(recorder):
    padded = torch.zeros(256, 24, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    custom_kernel(_data(mxfp4=lambda p: (p[0], padded)))
    custom_kernel(_data(mxfp4=lambda p: (p[0].view(torch.uint8), p[1].view(torch.uint8))))
    assert len(recorder) == 2


BAD_PLANS = {
    "runner": (Plan("bf17"), "plan.runner 'bf17' is unknown, expected one of bf16"),
    "page of 3": (Plan("a16w8_persistent", 1, page_size=3), "must be a power of 2 that divides kv_seq_len 400"),
    "page of 32": (Plan("a16w8_persistent", 1, page_size=32), "must be a power of 2 that divides"),
    "bf16 pages": (Plan("bf16", page_size=2), "plan.page_size must be 1 for bf16"),
    "persistent, no splits": (Plan("a8w8_persistent"), "plan.num_splits must be 1 … 25"),
    "persistent, 0 splits": (Plan("a8w8_persistent", 0), "plan.num_splits must be 1 … 25"),
    "more splits than blocks": (Plan("a16w8_persistent", 26), "plan.num_splits must be 1 … 25 for a16w8_persistent"),
    "more splits than pages of 8 hold": (Plan("a16w8_persistent", 14, page_size=2), "plan.num_splits must be 1 … 13"),
    "fp8, no splits": (Plan("fp8_nonpersistent"), "plan.num_splits must be given"),
    "an empty split": (Plan("bf16", 8), "plan.num_splits must be 1 … 7 for bf16 at kv_seq_len 400"),
    "0 splits": (Plan("fp8_nonpersistent", 0), "plan.num_splits must be 1 … 7"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_illegal_plans_are_refused(name, recorder):
    plan, message = BAD_PLANS[name]
    with pytest.raises(InputError) as caught:
        custom_kernel(generate_input(2, 1, 400, 0), plan=plan, kernels_honour_page_size=True)
    assert message in str(caught.value)
    assert not recorder


@pytest.mark.parametrize("runner", ["a16w8_persistent", "a8w8_persistent"])
def test_short_sequences_never_reach_the_metadata(runner, recorder):
    with pytest.raises(InputError, match="needs 196 pages a sequence, got 195"):
        custom_kernel(generate_input(2, 1, 195, 0), plan=Plan(runner, 1))


# ---- Strict mode ----


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
def test_strict_mode_wants_uniform_indptrs(name, recorder):
    data = _data(**{name: lambda t: t.sub(torch.tensor([0, 1, 0], dtype=torch.int32))})
    with pytest.raises(InputError, match=f"{name} is not arange"):
        custom_kernel(data, strict=True)
    assert not recorder
    custom_kernel(data)
    assert len(recorder) == 1


def test_strict_mode_wants_a_finite_output(recorder):
    """The recorder writes nothing, so the fresh output is the poison that the test session allocates."""
    with pytest.raises(FloatingPointError, match="gave NaN or infinity in 2 sequences, the first being 0"):
        custom_kernel(_data(), strict=True)
    custom_kernel(_data())


# ---- aiter: missing, unrelated, older, newer ----


def _without_ours(code: str, **environment: str) -> str:
    """What a program that does not know our portable aiter sees; the last line of its stderr."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code)],
        cwd=PROJECT_ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr.strip().splitlines()[-1]


CALL = f"""
    import sys
    sys.path += [p for p in {sys.path!r} if "portable" not in p]
    import submission
    submission._aiter()
"""


def test_a_missing_aiter_says_what_to_do():
    message = _without_ours(CALL)
    assert message.startswith("RuntimeError: aiter is missing")
    assert "github.com/ROCm/aiter" in message
    assert "PYTHONPATH=portable" in message


def test_an_unrelated_aiter_is_told_apart(tmp_path):
    (tmp_path / "aiter.py").write_text("'''async helpers'''\n")
    message = _without_ours(CALL, PYTHONPATH=str(tmp_path))
    assert f"the aiter at {tmp_path}/aiter.py has no MLA decode" in message
    assert "unrelated" in message


def test_an_old_aiter_is_told_apart(tmp_path):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("def get_mla_metadata_v1(): pass\n")
    (tmp_path / "aiter" / "mla.py").write_text("def mla_decode_fwd(q, kv_buffer, num_kv_splits=None): pass\n")
    message = _without_ours(CALL, PYTHONPATH=str(tmp_path))
    assert "too old, it lacks page_size, num_kv_splits_indptr, work_meta_data" in message
    assert "get_mla_metadata_info_v1" in message


@on_portable
@pytest.mark.parametrize("plan", [Plan("a16w8_persistent", 2), Plan("bf16")], ids=name_of)
def test_a_later_aiter_with_more_parameters_is_served(plan, monkeypatch):
    """Later versions insert parameters before dtype_q and append some to mla_decode_fwd."""
    metadata, decode = aiter.get_mla_metadata_v1, aiter.mla.mla_decode_fwd

    def later_metadata(*args, inserted=None, **kwargs):
        assert len(args) == 12, "whatever follows reduce_partial_map goes by keyword"
        metadata(*args, **kwargs)

    def later_decode(*args, appended=1, **kwargs):
        assert len(args) == 8, "only what all versions take in this order goes by position"
        return decode(*args, **kwargs)

    later_decode.__signature__ = inspect.signature(decode)
    monkeypatch.setattr(aiter, "get_mla_metadata_v1", later_metadata)
    monkeypatch.setattr(aiter.mla, "mla_decode_fwd", later_decode)
    assert _judge(generate_input(2, 1, 400, 6), plan).ok


# ---- The upload ----


def test_the_file_can_be_uploaded():
    raw = PROJECT_SUBMISSION.read_bytes()
    text = raw.decode("utf-8")
    assert len(raw) <= 1_000_000
    assert text.splitlines()[:2] == ["#!POPCORN leaderboard amd-mixed-mla", "#!POPCORN gpu MI355X"]
    assert "str" + "eam" not in text.lower()
    assert ".item(" not in text
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) <= {"torch", "task", "aiter", "triton"}


def test_the_file_imports_without_aiter():
    done = subprocess.run(
        [sys.executable, "-c", "import submission, sys; assert 'aiter' not in sys.modules"],
        cwd=PROJECT_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_exact_is_what_it_says(device):
    """The table's own answer at a shape with several splits, against another implementation of attention."""
    data = generate_input(2, 1, 700, 14)
    output = custom_kernel(data, plan=replace(Plan("bf16"), num_splits=2))
    expected = exact_attention(data)
    assert torch.allclose(output.float(), expected, atol=0.02, rtol=0.02)
