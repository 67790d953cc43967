"""The protocol: statistics and stop rule, cases, seeds, bytes and floors, and what a session does with a submission."""

import math
import sys
from pathlib import Path

import pytest
import torch

from bench import cases
from bench import traffic as roofline
from bench.basics import CaseFileError, Mode, UserError
from bench.worker import timing
from bench.worker.loading import load
from bench.worker.protocol import TIMED, WARM_UP, Job, Limits, Stats, measure
from bench.worker.session import Session
from reference import generate_input
from task import BENCHMARKS, TESTS, TestSpec

SMALL = TestSpec(batchsize=2, qseqlen=1, kvseqlen=256, seed=3)

# ---- statistics and the stop rule ----


def test_stats_are_the_sample_statistics():
    stats = Stats.of([1.0, 2.0, 3.0, 4.0])
    assert (stats.runs, stats.mean, stats.best, stats.worst) == (4, 2.5, 1.0, 4.0)
    assert stats.std == pytest.approx(math.sqrt(5 / 3))
    assert stats.err == pytest.approx(math.sqrt(5 / 3) / 2)


def test_stats_refuse_a_single_time():
    with pytest.raises(ValueError, match="two times or more"):
        Stats.of([1.0])


class Clockwork:
    """Calls that take given times, cyclically, and a wall clock that they and some idle time move on."""

    def __init__(self, *times: float, idle: float = 0.0):
        self.times, self.idle, self.wall, self.calls = times, idle, 0.0, 0

    def call(self) -> float:
        taken = self.times[self.calls % len(self.times)]
        self.calls += 1
        self.wall += taken + self.idle
        return taken

    def measure(self, limits: Limits) -> Stats:
        return measure(self.call, limits, now=lambda: self.wall)


def test_precise_times_stop_after_three_calls():
    assert Clockwork(100.0).measure(Limits(1000, 1e12)).runs == 3


def test_noise_goes_on_to_the_last_call():
    assert Clockwork(100.0, 200.0).measure(Limits(50, 1e12)).runs == 50


def test_noise_stops_once_the_error_is_small_enough():
    stats = Clockwork(99.0, 101.0).measure(Limits(1000, 1e12))
    assert stats.err < 0.001 * stats.mean
    assert 90 < stats.runs < 110  # err is about 1 / √runs, so 1 % noise needs 100 calls


def test_the_budget_of_call_time_stops():
    assert Clockwork(100.0, 200.0).measure(Limits(1000, 1450.0)).runs == 10  # 10 calls take 1500


def test_the_wall_stops_even_when_calls_are_short():
    assert Clockwork(1.0, 2.0, idle=1000.0).measure(Limits(1000, 1e12, wall_ns=4500.0)).runs == 5


def test_three_calls_are_made_whatever_they_cost():
    assert Clockwork(1e12, 2e12).measure(Limits(1000, 1.0, wall_ns=1.0)).runs == 3


def test_official_limits():
    assert TIMED[Mode.BENCHMARK] == Limits(1000, 50e9, 120e9)
    assert TIMED[Mode.LEADERBOARD] == Limits(100, 30e9, 120e9)
    assert {mode: limits.budget_ns for mode, limits in WARM_UP.items()} == {Mode.BENCHMARK: 1e8, Mode.LEADERBOARD: 1e7}


# ---- cases ----


def read(tmp_path: Path, text: str, secret: int | None = None) -> list[cases.FileCase]:
    path = tmp_path / "cases.txt"
    path.write_text(text)
    return cases.read_case_file(path, secret)


def test_case_file(tmp_path):
    text = "batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220\n  seed:+7;kvseqlen: 9 ; qseqlen: 1; batchsize: 2\n"
    first, second = read(tmp_path, text)
    assert first.args == TESTS[0]
    assert first.spec == "batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220"
    assert second.args == TestSpec(batchsize=2, qseqlen=1, kvseqlen=9, seed=7)
    assert second.spec == "  seed:+7;kvseqlen: 9 ; qseqlen: 1; batchsize: 2"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("batchsize 4; qseqlen: 1; kvseqlen: 8; seed: 1", "'batchsize 4' is not of the form"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 8; seed: 1;", "'' is not of the form"),
        ("", "'' is not of the form"),
        ("batchsize: four; qseqlen: 1; kvseqlen: 8; seed: 1", "batchsize must be a whole number, got 'four'"),
        ("batchsize: 4.0; qseqlen: 1; kvseqlen: 8; seed: 1", "batchsize must be a whole number, got '4.0'"),
        ("batchsize: 0; qseqlen: 1; kvseqlen: 8; seed: 1", "batchsize must be 1 or more, got 0"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: -8; seed: 1", "kvseqlen must be 1 or more, got -8"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 8", "seed missing"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 8; seed: 1; heads: 2", "unknown name 'heads'"),
        ("batchsize: 4; batchsize: 4; qseqlen: 1; kvseqlen: 8; seed: 1", "batchsize is given twice"),
    ],
)
def test_bad_case_line_is_named(tmp_path, line, complaint):
    with pytest.raises(CaseFileError) as caught:
        read(tmp_path, f"batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220\n{line}\n")
    assert "line 2: " in str(caught.value)
    assert complaint in str(caught.value)
    assert caught.value.exit_code == 113


def test_unreadable_case_files(tmp_path):
    with pytest.raises(CaseFileError, match="is empty"):
        read(tmp_path, "")
    with pytest.raises(CaseFileError, match="cannot read"):
        cases.read_case_file(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CaseFileError, match="cannot read"):
        cases.read_case_file(tmp_path / "binary")


def test_cantor_pairing():
    assert [cases.combine_seeds(a, b) for a, b in [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)]] == list(range(6))


def test_secret_seed_changes_the_case_and_not_its_name(tmp_path):
    (case,) = read(tmp_path, "batchsize: 4; qseqlen: 1; kvseqlen: 8; seed: 2", secret=3)
    assert case.args["seed"] == 5 * 6 // 2 + 2
    assert case.spec.endswith("seed: 2")


def test_shapes():
    assert cases.parse_shape("64x8192") == (64, 8192)
    assert cases.parse_shape("4×010") == (4, 10)
    for bad in ("64", "0x8", "8x0", "-1x8", "64x8192x2", "axb", ""):
        with pytest.raises(UserError, match="expected BATCHxKV_SEQ_LEN"):
            cases.parse_shape(bad)


def test_a_shape_takes_the_official_seed():
    seeds = {mode: cases.case_of_shape((4, 1024), mode)["seed"] for mode in (Mode.TEST, Mode.BENCHMARK)}
    assert seeds == {Mode.TEST: 4220, Mode.BENCHMARK: 4217}
    assert cases.case_of_shape((256, 1024), Mode.TEST)["seed"] == 9823  # a benchmark case only
    assert cases.case_of_shape((5, 7), Mode.TEST) == TestSpec(batchsize=5, qseqlen=1, kvseqlen=7, seed=1)


def test_quick_caps_and_merges():
    reduced = cases.quick(BENCHMARKS)
    assert [(c["batchsize"], c["kvseqlen"], c["seed"]) for c in reduced] == [(4, 1024, 4217), (4, 8192, 4220)]
    assert BENCHMARKS[-1]["batchsize"] == 256


# ---- bytes ----


def test_traffic_of_split_fp8():
    moved = roofline.traffic(64, 8192, "fp8", casts_q=True, num_splits=4)
    assert moved.cache == 64 * 8192 * 576
    assert (moved.q, moved.output, moved.q_cast) == (64 * 16 * 576 * 2, 64 * 16 * 512 * 2, 64 * 16 * 576 * 2)
    assert moved.partials == 64 * 4 * 16 * 513 * 4 * 2
    assert moved.compulsory == moved.cache + moved.q + moved.output
    assert moved.total == moved.compulsory + moved.q_cast + moved.partials


def test_traffic_without_partials():
    assert roofline.traffic(4, 1024, "bf16", num_splits=1).partials == 0
    unknown = roofline.traffic(4, 1024, "bf16", num_splits=None)
    assert unknown.partials is None
    assert unknown.total == unknown.compulsory


@pytest.mark.parametrize(("cache", "microseconds"), [("bf16", 302), ("fp8", 151), ("mxfp4", 80)])
def test_published_floors_of_an_mi355x(cache, microseconds):
    bandwidth = roofline.bandwidth_of("AMD Instinct MI355X (gfx950:sramecc+)")
    moved = roofline.traffic(256, 8192, cache)
    assert roofline.nanoseconds(moved.cache, bandwidth) / 1e3 == pytest.approx(microseconds, rel=0.005)


def test_known_devices():
    assert roofline.bandwidth_of("NVIDIA H200").bytes_per_second == 4.3e12
    assert roofline.bandwidth_of("AMD Radeon Graphics (gfx950)").device == "MI355X"
    assert roofline.bandwidth_of("cpu (some, 2 cores)") is None


# ---- the clocks ----


def test_a_gpu_is_timed_between_events_after_a_flush(monkeypatch):
    """With a stand-in for torch.cuda: what happens, in order."""
    done = []

    class Event:
        def __init__(self, *, enable_timing: bool):
            assert enable_timing

        def record(self):
            done.append("record")

        def elapsed_time(self, end: "Event") -> float:
            assert end is not self
            return 1.5  # milliseconds

    monkeypatch.setattr(timing, "_FLUSH_BYTES", 64)
    monkeypatch.setattr(timing, "_FLUSH_PASSES", 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("synchronize"))
    clock = timing.EventClock(torch.device("cpu"))
    clock._flush.fill_(255)

    def call(argument: str) -> str:
        done.append("flushed" if not clock._flush.any() else "not flushed")
        return argument

    assert clock.time(call, "result") == ("result", 1.5e6)
    assert done == ["synchronize", "record", "flushed", "record", "synchronize"]


def test_a_cpu_is_timed_by_the_wall_and_says_so():
    clock = timing.clock_for(torch.device("cpu"))
    result, nanoseconds = clock.time(sum, [1, 2])
    assert result == 3
    assert nanoseconds > 0
    assert "CPU wall clock" in clock.description


# ---- a session ----

EXACT = "from reference import ref_kernel\ndef custom_kernel(data):\n    return ref_kernel(data)\n"
# What the rules forbid: right on the first data it sees, stale on any other.
STALE = (
    "from reference import ref_kernel\nkept = []\ndef custom_kernel(data):\n    kept or kept.append(ref_kernel(data))\n"
    "    return kept[0]\n"
)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A function that opens a session on a submission's source, on the CPU and in this process."""
    if torch.version.hip:
        pytest.skip("AMD's aiter does not run on the CPU")
    monkeypatch.setitem(sys.modules, "submission", sys.modules["submission"])  # what is loaded goes again

    def open_session(source: str) -> Session:
        path = tmp_path / "somebody.py"
        path.write_text(source)
        steps.clear()
        return Session(path, "cpu", lambda what, share: steps.append(what))

    steps: list[str] = []
    open_session.steps = steps
    return open_session


def test_a_right_submission_passes_both_checks(session):
    result = session(EXACT).run(Job(Mode.TEST, SMALL))
    assert result.ok
    assert result.official.mismatch_ratio == 0.0
    assert (result.exact.precision, result.cache) == ("a8w8_tensor", "fp8")
    assert {"drawing q and the cache", "running the submission", "exact attention, a16w16"} <= set(session.steps)


def test_close_passes_the_official_check_and_not_the_exact_one(session):
    result = session(EXACT.replace("ref_kernel(data)\n", "ref_kernel(data) + 0.05\n")).run(Job(Mode.TEST, SMALL))
    assert result.official.ok
    assert not result.exact.ok
    assert not result.ok
    assert [failure.split(":")[0] for failure in result.failures] == ["exact check"]


def test_the_server_does_not_ask_for_exactness(session):
    result = session(EXACT.replace("ref_kernel(data)\n", "ref_kernel(data) + 0.05\n")).run(
        Job(Mode.TEST, SMALL, exact=False)
    )
    assert result.ok
    assert result.exact is None


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise KeyError('gone')", "KeyError: 'gone' (somebody.py, line 3, in custom_kernel)"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "returned NoneType, expected a tensor"),
        ("return ref_kernel(data)[:1]", "official check: shape is (1, 16, 512), expected (2, 16, 512)"),
        ("return ref_kernel(data).float()", "official check: dtype is torch.float32"),
        ("return ref_kernel(data) * 0", "official check: mismatch_ratio="),
    ],
)
def test_a_wrong_submission_is_a_failed_case(session, body, complaint):
    result = session(EXACT.replace("return ref_kernel(data)", body)).run(Job(Mode.TEST, SMALL))
    assert not result.ok
    assert complaint in result.failures[0]


def test_a_submission_that_spoils_its_input_is_checked_against_the_true_one(session):
    spoiling = EXACT.replace(
        "    return", "    data[0].zero_()\n    data[1]['fp8'][0].view(__import__('torch').uint8).zero_()\n    return"
    )
    assert not session(spoiling).run(Job(Mode.TEST, SMALL)).official.ok


def test_benchmark_repeats_the_same_data_and_leaderboard_does_not(session):
    limits = Limits(4, 1e12)
    assert session(STALE).run(Job(Mode.BENCHMARK, SMALL, limits=limits)).ok
    result = session(STALE).run(Job(Mode.LEADERBOARD, SMALL, limits=limits))
    assert result.failures[0].startswith("official check: timed call 1: ")
    assert result.stats is None
    assert result.exact.ok  # of the first call


def test_leaderboard_draws_every_13th_seed(session, monkeypatch):
    drawn = []

    def draw(**args):
        drawn.append(args["seed"])
        return generate_input(**args)

    monkeypatch.setattr("bench.worker.session.generate_input", draw)
    stats = session(EXACT).run(Job(Mode.LEADERBOARD, SMALL, exact=False, limits=Limits(3, 1e12))).stats
    assert stats.runs == 3
    assert drawn == [3, 16, 29, 42]


def test_only_the_checked_call_is_strict(session):
    source = EXACT.replace("(data):", "(data, *, strict=False):\n    seen.append(strict)") + "seen = []\n"
    opened = session(source)
    assert opened.run(Job(Mode.BENCHMARK, SMALL, limits=Limits(3, 1e12))).ok
    assert sys.modules["submission"].seen == [True, False, False, False]
    opened.run(Job(Mode.TEST, SMALL, exact=False))
    assert sys.modules["submission"].seen[-1] is False


def test_a_table_is_run_with_the_callers_word_on_paging(session):
    source = """
from types import SimpleNamespace as Record
from reference import ref_kernel
seen = []
TABLES = {"paged": {}}
def explain(batch_size, kv_seq_len, *, table=None, device=None):
    return Record(plan=Record(runner="fast", num_splits=4, page_size=8 if table else 1), precision="a8w8_tensor")
def custom_kernel(data, *, plan=None, kernels_honour_page_size=False):
    seen.append((plan and plan.page_size, kernels_honour_page_size))
    return ref_kernel(data)
"""
    opened = session(source)
    assert [plan.text for plan in opened.describe([SMALL], "paged").plans] == ["fast, 4 splits, page size 8"]
    assert [plan.text for plan in opened.describe([SMALL], None).plans] == ["fast, 4 splits"]
    assert opened.run(Job(Mode.TEST, SMALL, table="paged")).ok
    assert opened.run(Job(Mode.TEST, SMALL)).ok
    assert sys.modules["submission"].seen == [(8, True), (None, False)]
    with pytest.raises(UserError, match=r"unknown table 'v49': expected one of paged"):
        opened.describe([SMALL], "v49")


def test_profile_reports_a_table(session):
    result = session(EXACT).run(Job(Mode.PROFILE, SMALL))
    assert result.ok
    assert "aten::" in result.profile


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def custom_kernel(:", "cannot be loaded: SyntaxError"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero (file.py, line 1, in <module>)"),
        ("raise SystemExit", "cannot be loaded: SystemExit"),
        ("custom_kernel = 3", "has no function custom_kernel(data)"),
    ],
)
def test_what_is_no_submission(tmp_path, monkeypatch, source, complaint):
    monkeypatch.setitem(sys.modules, "submission", sys.modules["submission"])
    path = tmp_path / "file.py"
    path.write_text(source)
    with pytest.raises(UserError) as caught:
        load(path)
    assert complaint in str(caught.value)


def test_missing_submission_and_devices(tmp_path):
    with pytest.raises(UserError, match="no submission at"):
        load(tmp_path / "none.py")
    for device, complaint in {"tpu9": "unknown device", "meta": "not served", "cuda:99": "not there"}.items():
        with pytest.raises(UserError, match=complaint):
            Session(tmp_path / "none.py", device, print)
