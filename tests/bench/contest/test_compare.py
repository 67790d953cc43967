"""mla compare: on a CPU with a stand-in clock and stand-in contestants, and for real on a GPU."""

import csv
import dataclasses
import itertools
import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

import submission
from bench.basics import UserError
from bench.cli import app
from bench.contest import contestants, peers
from bench.contest.measurements import Ceilings
from bench.contest.peers import PEERS, Peer
from bench.contest.plans import parse_space, source_of, spec_of
from bench.contest.rounds import OURS, PEER, Contestant, hold
from reference import exact_attention, generate_input, quantize_fp8, relative_l2
from submission import TABLES, Plan, Tile
from task import TestSpec
from tests.conftest import on_gpu

compare = pytest.importorskip("bench.commands.compare", reason="needs Triton")

CPU = torch.device("cpu")
ARGS = TestSpec(batchsize=2, qseqlen=1, kvseqlen=40, seed=5)


class StandInClock:
    """Time is what the call says it took."""

    description = "a stand-in"
    ns = 0.0

    def time(self, call, argument):
        return call(argument), self.ns


def exact(data, precision="a16w16"):
    return exact_attention(data, precision).bfloat16()


class Field:
    """Stand-ins for everything but the command itself. us: what each name's or plan's call takes, by default 10."""

    def __init__(self, monkeypatch):
        self.clock, self.us, self.broken = StandInClock(), {}, {}
        monkeypatch.setattr(compare, "_gpu", lambda name: (CPU, self.clock))
        monkeypatch.setattr(contestants, "compile_plans", lambda *arguments: None)
        monkeypatch.setattr(compare.ceilings, "measure", lambda *arguments: Ceilings(3000.0, 4.0e12, 4.2e12))
        monkeypatch.setattr(contestants, "processors_of", lambda device: 132)
        monkeypatch.setattr(contestants, "tables_of", lambda device: ("sm_90",))
        monkeypatch.setattr(contestants, "custom_kernel", self.kernel)
        named = [("flashmla-fp8", peers.YARDSTICK, "a8w8"), ("baseline", "Triton baseline bf16", "a16w16")]
        found = [Peer(key, name, p, "torch", "torch", "", self.starter(name, p)) for key, name, p in named]
        monkeypatch.setattr(
            peers, "PEERS", (*found, Peer("gone", "Gone", "a16w16", "no_such_module", "gone", "ask", None))
        )

    def kernel(self, data, *, plan, kernels_honour_page_size):
        return self.answer(data, plan, plan.precision)

    def starter(self, name, precision):
        return lambda data: lambda data: lambda data: self.answer(data, name, precision)

    def answer(self, data, key, precision):
        self.clock.ns = self.us.get(key, 10.0) * 1e3
        broken = self.broken.get(key, lambda output: output)
        return broken(exact(data, precision))


@pytest.fixture
def field(monkeypatch):
    return Field(monkeypatch)


def mla(*arguments: object):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *map(str, arguments)])


def small(*arguments: object):
    return mla("--case", "2x40", "--rounds", 3, *arguments)


def line_of(output: str, start: str) -> list[str]:
    return next(line for line in output.splitlines() if line.strip().startswith(start)).split()


def raising(message):
    def broken(output):
        raise ValueError(message)

    return broken


# ---- what is shown and written ----


def test_the_table_compares_with_the_yardstick(field):
    plan = submission.plan_for(2, 40, table="sm_90")
    field.us |= {plan: 5.0, peers.YARDSTICK: 8.0}
    result = small("--case", "1x200")
    assert result.exit_code == 0, result.output
    assert line_of(result.output, "table sm_90")[2:4] == ["5.0", "10.0"]
    assert line_of(result.output, peers.YARDSTICK)[2:5] == ["8.0", "8.0", "8.0"]
    geomean = (5.0 * 10.0) ** 0.5
    assert line_of(result.output, "table sm_90")[4] == f"{geomean:.1f}"
    assert line_of(result.output, "table sm_90")[-1] == f"{8.0 / geomean:.2f}"
    assert "3.0 µs" in result.output or "3 µs" in result.output
    assert "4 TB/s copying, 4.2 TB/s reading" in result.output
    assert "not installed: Gone; ask" in result.output
    assert result.output.rstrip().endswith("check: pass")


def test_the_csv_has_a_row_a_contestant_and_shape(field, tmp_path):
    path, plan = tmp_path / "out.csv", submission.plan_for(2, 40, table="sm_90")
    field.us[plan] = 5.0
    assert small("--case", "1x200", "--csv", path, "--commit", "abc").exit_code == 0
    rows = list(csv.DictReader(path.open()))
    assert [(r["kv_seq_len"], r["kind"], r["contestant"]) for r in rows] == [
        (length, kind, name)
        for length in ("40", "200")
        for kind, name in (("ours", "table sm_90"), ("peer", "FlashMLA fp8"), ("peer", "Triton baseline bf16"))
    ]
    ours, theirs = rows[:2]
    assert (ours["table"], ours["runner"], ours["cache"], ours["precision"]) == ("sm_90", "wgmma", "fp8", "a16w8")
    assert ours["num_splits"] == str(plan.num_splits)
    assert {name: ours[name] for name in ("block", "warps", "stages", "merge")} == {
        name: str(getattr(plan.tile, name)) for name in ("block", "warps", "stages", "merge")
    }
    assert [ours[name] for name in ("median_us", "p10_us", "p90_us", "min_us", "runs")] == ["5.00"] * 4 + ["3"]
    assert float(ours["gate_a"]) < 0.004 < float(ours["gate_b"]) < 0.045
    assert float(ours["floor_us"]) == pytest.approx(2 * (40 * 576 + 16 * (576 + 512) * 2) / 4.2e6, abs=0.005)
    assert ours["commit"]
    assert ours["fault"] == theirs["fault"] == theirs["num_splits"] == ""
    assert theirs["version"] == f"torch {torch.__version__}"


def test_the_json_has_all_times(field, tmp_path):
    path = tmp_path / "out.json"
    assert small("--json", path, "--peer", "baseline").exit_code == 0
    content = json.loads(path.read_text())
    assert content["ceilings"] == {"launch_ns": 3000.0, "copy": 4.0e12, "read": 4.2e12}
    assert [r["contestant"] for r in content["results"]] == ["table sm_90", "Triton baseline bf16"]
    assert content["results"][0]["times_us"] == [10.0] * 3
    assert content["check"] == "pass"


def test_without_a_checkout_the_commit_is_what_was_given(field, monkeypatch, tmp_path):
    monkeypatch.setattr(compare.environment, "git_commit", lambda: None)
    small("--csv", tmp_path / "out.csv", "--commit", "abc-dirty")
    assert {row["commit"] for row in csv.DictReader((tmp_path / "out.csv").open())} == {"abc-dirty"}


def test_the_roofline_reads_the_csv(field, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    from bench.contest.measurements import read_csv

    field.broken["Triton baseline bf16"] = raising("no")
    small("--case", "1x200", "--csv", tmp_path / "out.csv")
    read = read_csv(tmp_path / "out.csv")
    assert {(p.batch_size, p.line) for p in read.points} == {
        (batch, line) for batch in (1, 2) for line in ("ours, fp8 cache", "FlashMLA fp8")
    }
    assert (read.rate, read.launch) == (4.2e12, pytest.approx(3e-6))
    drawn = CliRunner().invoke(app, ["roofline", str(tmp_path / "out.csv"), "--out", str(tmp_path / "out.png")])
    assert drawn.exit_code == 0, drawn.output


# ---- faults ----


def test_a_peer_that_raises_is_a_row(field, tmp_path):
    field.broken[peers.YARDSTICK] = raising("no [luck]\nand more")
    result = small("--csv", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    assert "FlashMLA fp8, 2 × 40: ValueError: no [luck]" in result.output
    row = list(csv.DictReader((tmp_path / "out.csv").open()))[1]
    assert (row["median_us"], row["gate_b"], row["fault"]) == ("", "", "ValueError: no [luck]")
    assert line_of(result.output, "Triton baseline bf16")[3] == "10.0"


def test_ours_raising_fails_and_ends_only_itself(field):
    field.broken[submission.plan_for(2, 40, table="sm_90")] = raising("no")
    result = small("--case", "1x200")
    assert result.exit_code == 1
    assert line_of(result.output, "table sm_90")[2:5] == ["error", "10.0", "–"]
    assert line_of(result.output, peers.YARDSTICK)[2:4] == ["10.0", "10.0"]
    assert result.output.rstrip().endswith("check: fail")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda output: output * 1.01, "gate A: 0.01"),
        (lambda output: output * torch.nan, "gate A: inf"),
        (lambda output: output[:1], "the output has shape (1, 16, 512), expected (2, 16, 512)"),
        (lambda output: None, "it returned NoneType, expected a tensor"),
    ],
)
def test_a_wrong_output_of_ours_fails(field, change, says):
    field.broken[submission.plan_for(2, 40, table="sm_90")] = change
    result = small()
    assert result.exit_code == 1
    assert says in result.output


def test_a_wrong_peer_is_marked_and_not_compared_with(field):
    field.broken[peers.YARDSTICK] = lambda output: output * 1.2
    result = small()
    assert result.exit_code == 0
    assert line_of(result.output, peers.YARDSTICK)[2] == "10.0!"
    assert line_of(result.output, "table sm_90")[-1] == "–"


def test_an_output_that_is_kept_from_an_earlier_call_is_seen():
    """Right in the first, checked call; stale in the last."""
    kept = []

    def stale(data):
        kept.append(exact(data))
        return kept[0]

    [result] = hold([contestant("stale", stale)], ARGS, 2, StandInClock(), CPU, lambda *step: None)
    assert "gate A" in result.fault


def test_a_peer_that_cannot_be_built_fails_once_and_is_a_row(field, monkeypatch):
    attempts = []

    def build():
        attempts.append(1)
        raise OSError("no nvcc")

    first, *others = peers.PEERS
    monkeypatch.setattr(peers, "PEERS", (dataclasses.replace(first, build=build), *others))
    result = small("--case", "1x200")
    assert result.exit_code == 0
    assert f"{peers.YARDSTICK}: OSError: no nvcc (2 times, first 2 × 40)" in result.output
    assert line_of(result.output, "Triton baseline bf16")[3:5] == ["10.0", "10.0"]
    assert len(attempts) == 1


# ---- the contest itself ----


def contestant(name, call, kind=OURS):
    return Contestant(name, kind, "a16w16", "", lambda data: lambda data: call)


def test_each_round_is_new_data_for_all_from_another_one_on():
    seen = []

    def recording(name):
        def call(data):
            seen.append((name, data[0].flatten()[0].item()))
            return exact(data)

        return contestant(name, call)

    results = hold([recording(name) for name in "abc"], ARGS, 3, StandInClock(), CPU, lambda *step: None)
    assert "".join(name for name, _ in seen) == "abc" + "bca" + "cab" + "abc"
    rounds = [{value for _, value in seen[i : i + 3]} for i in range(0, 12, 3)]
    assert all(len(values) == 1 for values in rounds)
    assert len(set().union(*rounds)) == 4
    assert [len(r.times_ns) for r in results] == [3, 3, 3]


def test_a_failure_midway_leaves_no_time():
    calls = iter(range(9))

    def tires(data):
        if next(calls) == 2:
            raise RuntimeError("enough")
        return exact(data)

    rested = contestant("rested", exact)
    ended, other = hold([contestant("tires", tires), rested], ARGS, 3, StandInClock(), CPU, lambda *step: None)
    assert (ended.error, ended.median_ns) == ("RuntimeError: enough", None)
    assert other.fault is None


def test_data_that_cannot_be_drawn_ends_the_shape(monkeypatch):
    """As after an illegal access of a contestant."""
    from bench.contest import rounds

    draws = iter([generate_input(**ARGS, device="cpu")])
    monkeypatch.setattr(rounds, "generate_input", lambda **_: next(draws))
    results = hold([contestant("one", exact, PEER)], ARGS, 3, StandInClock(), CPU, lambda *step: None)
    assert results[0].error == "drawing the data: StopIteration: "


# ---- spaces of plans ----


def test_the_fastest_plans_are_printed_as_tables(field):
    def plan(cache, splits):
        return Plan("fused", num_splits=splits, tile=Tile(cache, block=16))

    field.us = {plan("fp8", 2): 7.0, plan("mxfp4", 1): 6.0, plan("fp8", 1): 5.0}
    field.broken[plan("fp8", 1)] = raising("out of shared memory")
    result = small("--plans", "fp8/mxfp4,splits=1/2,block=16", "--no-peers")
    assert result.exit_code == 0, result.output
    assert "out of shared memory" in result.output
    assert "table sm_90" not in result.output
    pasted = [line.split("µs")[0] for line in result.output.splitlines() if line.startswith("    (2, 40): ")]
    entries = [eval(f"{{{line.split('#')[0]}}}", {"Plan": Plan, "Tile": Tile}) for line in pasted]
    assert entries == [{(2, 40): plan("fp8", 2)}, {(2, 40): plan("mxfp4", 1)}]
    listed = [line.split()[-1] for line in result.output.splitlines() if line.startswith("2 × 40 ")]
    assert listed[0] == spec_of(plan("fp8", 2))


def test_a_space_without_a_plan_that_runs_fails(field):
    for splits in (1, 2):
        field.broken[Plan("fused", num_splits=splits, tile=Tile("fp8"))] = raising("no")
    result = small("--plans", "fp8,splits=1/2", "--no-peers")
    assert result.exit_code == 1
    assert "ValueError: no (2 times, first 2 × 40 fp8,splits=1," in result.output


def test_a_wrong_plan_of_a_space_fails_though_others_are_right(field):
    field.broken[Plan("fused", num_splits=2, tile=Tile("fp8"))] = lambda output: output * 1.1
    assert small("--plans", "fp8,splits=1/2", "--no-peers").exit_code == 1


def test_a_space_is_all_its_alternatives_once():
    plans = parse_space("bf16/fp8,splits=1/2,merge=last/kernel").plans(4, 1024, 132)
    assert len(plans) == 2 * (1 + 2)
    assert {(p.tile.cache, p.num_splits) for p in plans} == {(c, s) for c in ("bf16", "fp8") for s in (1, 2)}
    assert parse_space("mxfp4,splits=3").plans(4, 1024, 132) == [Plan("fused", num_splits=3, tile=Tile("mxfp4"))]


def test_automatic_splits_fit_the_shape_and_the_machine():
    def splits(batch, length, block=64):
        return [p.num_splits for p in parse_space(f"fp8,block={block}").plans(batch, length, 132)]

    assert splits(4, 1024) == [1, 2, 4, 8, 16]
    assert splits(4, 8192) == [1, 2, 4, 8, 16, 32, 33, 64, 66, 99, 128]
    assert splits(256, 8192) == [1, 2, 4]
    assert splits(4, 64) == splits(4096, 8192) == [1]


@pytest.mark.parametrize("plan", dict.fromkeys(p for t in TABLES.values() for p in t.values() if p.tile))
def test_a_plan_survives_being_written(plan):
    assert parse_space(spec_of(plan)).plans(1, 10**6, 132) == [plan]
    assert eval(source_of(plan), {"Plan": Plan, "Tile": Tile}) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the cache format comes first"),
        ("int8", "one of bf16, fp8, mxfp4; got 'int8'"),
        ("fp8,", "'' is not NAME=VALUE"),
        ("fp8,splits", "'splits' is not NAME=VALUE"),
        ("fp8,size=3", "'size=3' is not NAME=VALUE"),
        ("fp8,warps=4,warps=8", "each name once"),
        ("fp8,splits=2,splits=4", "each name once"),
        ("fp8,cache=bf16", "is not NAME=VALUE"),
        ("fp8,splits=0", "splits must be a number of 1 or more"),
        ("fp8,splits=2/x", "got 'x'"),
        ("fp8,warps=-4", "warps must be a number"),
    ],
)
def test_other_spaces_are_refused(text, says):
    with pytest.raises(UserError, match="--plans") as refused:
        parse_space(text)
    assert says in str(refused.value)


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--case", "4"], "expected BATCHxKV_SEQ_LEN"),
        (["--table", "sm_91"], "unknown table 'sm_91'"),
        (["--peer", "nobody"], "unknown peer 'nobody'"),
        (["--peer", "baseline", "--no-peers"], "exclude each other"),
        (["--plans", "fp8,splits"], "is not NAME=VALUE"),
        (["--rounds", "0"], "expected 1 or more timed calls"),
        (["--csv", "nowhere/out.csv"], "--csv"),
        (["--json", "."], "--json"),
    ],
)
def test_wrong_usage_is_refused_before_any_work(field, monkeypatch, arguments, says):
    monkeypatch.setattr(compare, "_gpu", lambda name: pytest.fail("reached the GPU"))
    result = mla(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.output


def test_without_a_gpu_it_says_what_it_needs():
    result = mla("--device", "cpu")
    assert result.exit_code == 2
    assert "needs a GPU, the device is cpu" in result.output


# ---- the peers, with stand-ins for their packages that do what their signatures say ----


def attend_pages(q, pages, table, lengths):
    """Float32 attention over pages of tokens: q (batch, 16, 576), pages (n, size, 576), table (batch, …)."""
    outputs = []
    for query, row, length in zip(q.float(), table, lengths.tolist(), strict=True):
        rows = pages[row.long()].float().flatten(0, 1)[:length]
        outputs.append(torch.softmax(query @ rows.T / 24, -1) @ rows[:, :512])
    return torch.stack(outputs).bfloat16()


def flash_mla_stand_in(calls):
    def metadata(seqlens_k, num_q_tokens_per_head_k, h_k, *, is_fp8_kvcache, use_legacy):
        assert (num_q_tokens_per_head_k, h_k, is_fp8_kvcache, use_legacy) == (16, 1, True, True)
        return torch.zeros(1), torch.zeros(1)

    def with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, *,
        softmax_scale, is_fp8_kvcache, use_legacy, descale_q=None, descale_k=None,
    ):  # fmt: skip
        assert use_legacy
        assert (head_dim_v, softmax_scale, k_cache.shape[1:]) == (512, 1 / 24, (64, 1, 576))
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        assert q.dtype == k_cache.dtype == (torch.float8_e4m3fn if is_fp8_kvcache else torch.bfloat16)
        if is_fp8_kvcache:
            assert tile_scheduler_metadata.num_splits is not None
            assert descale_q.shape == descale_k.shape == (1,)
            q, k_cache = q.float() * descale_q, k_cache.float() * descale_k
        calls.append(is_fp8_kvcache)
        return attend_pages(q[:, 0], k_cache[:, :, 0], block_table, cache_seqlens).unsqueeze(1), None

    return types.SimpleNamespace(
        get_mla_metadata=lambda: (types.SimpleNamespace(num_splits=None), None),
        get_mla_decoding_metadata=metadata,
        flash_mla_with_kvcache=with_kvcache,
    )


def flashinfer_stand_in(calls):
    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer, *, backend):
            assert (float_workspace_buffer.dtype, backend) == (torch.int8, "fa3")

        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
            causal, sm_scale, q_data_type, kv_data_type,
        ):  # fmt: skip
            assert (num_heads, head_dim_ckv, head_dim_kpe, causal, sm_scale) == (16, 512, 64, False, 1 / 24)
            assert qo_indptr.dtype == kv_indptr.dtype == kv_indices.dtype == kv_len_arr.dtype == torch.int32
            self.table = [kv_indices[a:b] for a, b in itertools.pairwise(kv_indptr)]
            self.lengths, self.page, self.kv = kv_len_arr, page_size, kv_data_type

        def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, ckv_scale=None, kpe_scale=None):
            assert ckv_cache.dtype == kpe_cache.dtype == self.kv
            assert ckv_cache.shape[1:] == (self.page, 512)
            assert (ckv_scale is None) == (self.kv == torch.bfloat16)
            pages = torch.cat([ckv_cache.float() * (ckv_scale or 1), kpe_cache.float() * (kpe_scale or 1)], -1)
            calls.append(self.kv)
            return attend_pages(torch.cat([q_nope, q_pe], -1), pages, self.table, self.lengths)

    return types.SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)


@pytest.mark.parametrize("key", ["flashmla-bf16", "flashmla-fp8", "flashinfer-bf16", "flashinfer-fp8"])
def test_peers_are_given_the_whole_cache(monkeypatch, key):
    """Started on one data, bound to another: right on that, also where the fp8 scale differs."""
    calls = []
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_stand_in(calls))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", flashinfer_stand_in(calls))
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace())
    peer = next(p for p in PEERS if p.key == key)
    bind = peer.start(generate_input(3, 1, 128, 1, device="cpu"))
    data = generate_input(3, 1, 128, 2, device="cpu")
    data[1]["fp8"] = quantize_fp8(data[1]["bf16"] * 3)
    data[1]["bf16"] *= 3
    output = bind(data)(data)
    assert len(calls) == 1
    assert output.shape == (3, 16, 512)
    assert relative_l2(output, exact_attention(data, peer.precision)).max() < 0.004


@pytest.mark.parametrize("key", ["flashmla-bf16", "flashmla-fp8"])
def test_flash_mla_refuses_lengths_that_are_not_pages(monkeypatch, key):
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_stand_in([]))
    peer = next(p for p in PEERS if p.key == key)
    with pytest.raises(ValueError, match="must be a multiple, got 100"):
        peer.start(generate_input(1, 1, 100, 1, device="cpu"))


# ---- for real ----


@on_gpu
def test_on_a_gpu(tmp_path):
    result = mla("--case", "4x1024", "--rounds", 2, "--peer", "baseline", "--csv", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert rows[-1]["contestant"] == "Triton baseline bf16"
    for row in rows:
        assert not row["fault"]
        assert float(row["launch_us"]) < float(row["median_us"]) < 1000


@on_gpu
def test_compiling_ahead_leaves_nothing_to_compile(monkeypatch):
    import triton

    compiled = []
    plans = [Plan("fused", num_splits=4, tile=Tile(cache, merge="kernel")) for cache in ("bf16", "fp8", "mxfp4")]
    contestants.compile_plans(plans, torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"]))
    data = generate_input(4, 1, 1024, 1, device="cuda")
    for plan in plans:
        submission.custom_kernel(data, plan=plan)
    assert not compiled


@on_gpu
def test_ceilings_are_plausible():
    """An empty launch takes microseconds; memory does not beat 20 TB/s, nor does reading lag far behind copying."""
    from bench.contest.ceilings import measure
    from bench.worker.timing import EventClock

    device = torch.device("cuda")
    found = measure(EventClock(device), device)
    assert 500 < found.launch_ns < 100_000
    assert 1e11 < found.copy < 2e13
    assert 0.7 * found.copy < found.read < 2e13
