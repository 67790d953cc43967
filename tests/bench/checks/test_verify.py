"""mla verify: a right file passes, each mutant is caught by the right check, and ours passes whatever the plan."""

import json
import random

import pytest
import torch
from typer.testing import CliRunner

import submission
from bench.basics import PROJECT_SUBMISSION
from bench.checks.census import take_census
from bench.checks.checks import CHECKS, run_check
from bench.checks.hard import HARD, MAX_LOGIT
from bench.checks.needles import Needle, diagnose, edges, ends, plan_needles, with_needles
from bench.checks.scope import Scope
from bench.checks.upload import upload_faults
from bench.cli import app
from bench.worker.loading import load
from bench.worker.subject import Subject
from reference import (
    PRECISIONS,
    cast_q,
    check_implementation,
    dequantize_rows,
    generate_input,
    quantize_fp8,
    quantize_mxfp4,
)
from submission import Plan
from tests.bench.checks.mutants import KV, MUTANTS, RETURN, RIGHT
from tests.conftest import on_gpu, on_portable
from tests.plans import ON_AITER, name_of

SCOPE = Scope(shapes=((2, 300), (3, 320)), seed=5)


@pytest.fixture(autouse=True)
def _memory_as_it_comes(monkeypatch):
    """As the command has it: not poisoned, as in the other tests."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@pytest.fixture
def subject_of():
    def make(path, device="cpu"):
        return Subject(load(path), torch.device(device), None, lambda what, share: None)

    return make


# ---- Mutants ----


@pytest.fixture
def findings_of(subject_of):
    """What a check finds, in both of its parts where it has two, each on a file loaded anew."""

    def run(name, path, device="cpu"):
        findings = run_check(name, subject_of(path, device), SCOPE).findings
        if CHECKS[name].apart:
            findings += run_check(name, subject_of(path, device), SCOPE, apart=True).findings
        return findings

    return run


@pytest.mark.parametrize("name", CHECKS)
def test_a_right_file_passes(name, tmp_path, subject_of, findings_of):
    path = tmp_path / "right.py"
    path.write_text(RIGHT)
    assert findings_of(name, path) == []
    assert run_check(name, subject_of(path), SCOPE).note


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_the_right_check(name, tmp_path, findings_of):
    mutant = MUTANTS[name]
    if mutant.on_gpu and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    findings = findings_of(mutant.caught_by, mutant.write(tmp_path), "cuda:0" if mutant.on_gpu else "cpu")
    assert any(mutant.says in finding for finding in findings), findings


@pytest.mark.parametrize(
    "name", ["reads one token a page of 2", "drops the last tile", "keeps its first output", "returns zeros"]
)
def test_the_official_check_takes_what_verify_refuses(name, tmp_path, subject_of):
    """At kv 8192, on the first call: the reason for all of this."""
    data = generate_input(1, 1, 8192, 3, device="cpu")
    output = subject_of(MUTANTS[name].write(tmp_path)).call(data)
    assert check_implementation(data, output)[0]


def test_every_check_has_a_mutant():
    assert {mutant.caught_by for mutant in MUTANTS.values()} == set(CHECKS)


# ---- Our own submission, whatever its plan ----


class _Planned(Subject):
    """Ours with one plan for every shape it is legal for."""

    def __init__(self, plan):
        super().__init__(load(PROJECT_SUBMISSION), torch.device("cpu"), None, lambda what, share: None)
        self.plan = plan

    def precision(self, shape):
        return self.plan.precision

    def call(self, data):
        return submission.custom_kernel(data, plan=self.plan)


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "upload"])
@pytest.mark.parametrize("plan", ON_AITER, ids=name_of)
def test_every_plan_passes_every_check(plan, name):
    if (
        name == "fresh"
        and isinstance(submission.RUNNERS[plan.runner], submission.PersistentRunner)
        and plan.num_splits > 1
    ):
        plan = Plan(plan.runner, 2)
    outcome = run_check(name, _Planned(plan), Scope(shapes=((2, 800),), seed=8))
    assert outcome.ok, outcome.findings


def test_our_file_can_be_uploaded():
    assert upload_faults(PROJECT_SUBMISSION) == []


# ---- The census ----


def _attention_with(data, precision, change):
    """Attention in float64 whose weights (batch, 16, tokens) `change` alters before they are normalised again."""
    q, kv_data, *_, config = data
    shape = config["batch_size"], config["kv_seq_len"]
    wanted = PRECISIONS[precision]
    kv = dequantize_rows(kv_data, wanted.cache, slice(0, shape[0] * shape[1])).view(*shape, 576).double()
    weights = torch.softmax(cast_q(q, wanted.q_cast).double() @ kv.transpose(1, 2) / 24, -1)
    change(weights)
    return (weights / weights.sum(-1, keepdim=True) @ kv[..., :512]).bfloat16()


@pytest.mark.parametrize("precision", ["a16w16", "a8w8", "a16w4"])
def test_the_census_names_single_tokens(precision):
    data = generate_input(3, 1, 2048, 6, device="cpu")

    def change(weights):
        weights[0, :, 77] = 0
        weights[1, :, 2047] *= 2
        weights[2, 9, 1000] = 0

    census = take_census(data, _attention_with(data, precision, change), precision)
    assert (census.lost, census.doubled) == ([(0, 77)], [(1, 2047)])
    # Not every head alone gives a token so much weight that it can be told.
    assert set(census.by_head) <= {(2, 9, 1000), *((0, h, 77) for h in range(16)), *((1, h, 2047) for h in range(16))}
    assert census.judged > 0.98 * 3 * 2048
    assert take_census(data, _attention_with(data, precision, lambda weights: None), precision).lost == []


@on_portable
@pytest.mark.parametrize("shape", [(100, 17), (64, 40), (8, 1024), (40, 2), (5, 1)])
@pytest.mark.parametrize("plan", [Plan("fp8_nonpersistent", 1), Plan("bf16", 1)], ids=name_of)
def test_the_census_finds_nothing_where_nothing_is_lost(plan, shape):
    """Least of all what rounding probabilities to fp8 does to tokens of little weight."""
    data = generate_input(shape[0], 1, shape[1], 3, device="cpu")
    census = take_census(data, submission.custom_kernel(data, plan=plan), plan.precision)
    assert (census.lost, census.doubled, census.by_head) == ([], [], [])


# ---- Needles ----


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 5), (2, 300), (64, 64), (4, 1024)])
def test_needles_cover_every_position_and_both_ends_of_the_batch(batch, length):
    calls = plan_needles(batch, length, length, random.Random(1))
    single = {(n.sequence, n.position) for needles in calls for n in needles if n.twin is None}
    assert {p for _, p in single} == set(range(length))
    assert {p for b, p in single if b == 0} >= set(ends(length))
    assert {p for b, p in single if b == batch - 1} >= set(ends(length))
    by_head = {(n.head, n.position) for needles in calls for n in needles if n.twin is None}
    assert by_head >= {(head, position) for head in range(16) for position in ends(length)}
    assert length == 1 or {n.position for needles in calls for n in needles if n.twin is not None} == set(edges(length))
    for needles in calls:
        places = {(n.sequence, n.head) for n in needles}
        rows = [(n.sequence, p) for n in needles for p in (n.position, n.twin) if p is not None]
        assert len(places) == len(needles)
        assert len(set(rows)) == len(rows), "no row is wanted twice in a call"
        assert all(0 <= n.head < 16 and 0 <= n.sequence < batch for n in needles)


def test_edges_hold_both_sides_of_pages_tiles_and_splits():
    assert {0, 1, 2, 7, 8, 63, 64, 127, 128, 511, 512, 1020, 1021, 1022, 1023} <= set(edges(1024))
    assert {204, 205, 614, 615} <= set(edges(1024)), "1024 in 5 splits, all of them"
    assert {207, 208, 623, 624} <= set(edges(1024)), "1024 in 5 splits of whole tiles"
    assert edges(1) == [0]


def test_needles_are_in_every_format_of_the_cache():
    """As if the cache had been quantised whole."""
    data = generate_input(3, 1, 300, 4, device="cpu")
    _, kv_data, *_ = with_needles(data, [Needle(0, 3, 100), Needle(2, 5, 299, 7)])
    for name, quantise in (("fp8", quantize_fp8), ("mxfp4", quantize_mxfp4)):
        for got, wanted in zip(kv_data[name], quantise(kv_data["bf16"]), strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_a_needle_carries_nearly_all_the_weight():
    data = generate_input(2, 1, 8192, 4, device="cpu")
    needles = [Needle(1, head, 500 * head) for head in range(16)]
    q, kv_data, *_ = with_needles(data, needles)
    keys = kv_data["bf16"][8192:, 0].float()
    weights = torch.softmax(q[1].float() @ keys.T / 24, -1)
    assert all(weights[n.head, n.position] > 0.99 for n in needles)


def test_twins_share_the_weight_and_differ_in_value():
    data = generate_input(1, 1, 512, 4, device="cpu")
    q, kv_data, *_ = with_needles(data, [Needle(0, 3, 100, 400)])
    keys = kv_data["bf16"][:, 0].float()
    weights = torch.softmax(q[0, 3].float() @ keys.T / 24, -1)
    assert weights[100].item() == pytest.approx(0.5, abs=0.05)
    assert weights[400].item() == pytest.approx(0.5, abs=0.05)
    assert (keys[100] - keys[400]).norm() > keys[100].norm()


def _tried(length=256, sequences=(0, 1)):
    return {(b, p) for b in sequences for p in range(length)}


@pytest.mark.parametrize(
    ("missed", "says"),
    [
        (lambda b, p: p % 4, "only tokens 0, 4, 8, … are read: this reads one token a page of 4"),
        (lambda b, p: p >= 253, "the last 3 tokens of each sequence"),
        (lambda b, p: p == 255, "the last token of each sequence"),
        (lambda b, p: p < 16, "the first 16 tokens of each sequence"),
        (lambda b, p: 64 <= p < 128, "tokens 64 … 127"),
        (lambda b, p: p == 77, "token 77"),
        (lambda b, p: p % 64 == 63, "token 63 of every 64"),
        (lambda b, p: b == 1, "all those of sequence 1 and none of the others"),
        (lambda b, p: b == 1 and p == 9, "at position 9, which other sequences find"),
        (lambda b, p: p in (3, 77, 78), "at positions 3, 77, 78"),
        (lambda b, p: True, "512 of 512 needles missed: no token is found"),
    ],
)
def test_the_pattern_of_misses_is_named(missed, says):
    tried = _tried()
    assert says in diagnose(tried, {item for item in tried if missed(*item)}, 256)


def test_no_misses_no_words():
    assert diagnose(_tried(), set(), 256) == ""


# ---- Hard numbers are as hard as they say ----


def test_hard_numbers_stay_in_the_range_of_the_fp8_runners_and_of_float32():
    q, kv_data, *_ = generate_input(4, 1, 1024, 2, device="cpu")
    peaks = {}
    for name, change in HARD.items():
        hard_q, hard_kv = change(q, kv_data["bf16"])
        assert hard_q.abs().max() <= 448, name
        assert torch.isfinite(hard_kv).all(), name
        keys = hard_kv.float().view(4, 1024, 576)
        peaks[name] = (hard_q.double() @ keys.double().transpose(1, 2) / 24).abs().max().item()
        assert peaks[name] <= MAX_LOGIT, f"{name}: float32 does not hold such logits to a part of gate A"
    assert 70 < peaks["logits to about ±80"] < 100
    assert peaks["q at ±448, the edge of fp8"] > 300
    assert peaks["a cache scale of 1e4, logits to ±2500"] > 1500


@pytest.mark.parametrize("seed", range(20))
def test_the_edge_of_fp8_is_reached_and_not_passed(seed):
    q = torch.randn(1, 16, 576, generator=torch.Generator().manual_seed(seed)).bfloat16()
    scaled, _ = HARD["q at ±448, the edge of fp8"](q, torch.zeros(1))
    assert scaled.abs().max() == 448


# ---- The upload's rules ----


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (RIGHT.encode() + b"# " + b"x" * 1_000_000, "at most 1,000,000"),
        (RIGHT.encode("utf-8") + b"# \xff", "not UTF-8"),
        (RIGHT.encode() + b"from pandas.core import frame\n", "imports pandas"),
        (RIGHT.encode() + b"from .mine import part\n", "imports ., which"),
        (RIGHT.encode() + b"try:\n    import rich\nexcept ImportError:\n    raise\n", "imports rich"),
        (RIGHT.encode() + b"def broken(:\n", "not Python"),
        (b"import torch\n" + RIGHT.encode().split(b"\n", 2)[2], "leaderboard amd-mixed-mla' is missing"),
    ],
)
def test_uploads_are_judged(tmp_path, content, says):
    path = tmp_path / "file.py"
    path.write_bytes(content)
    assert any(says in fault for fault in upload_faults(path))


def test_imports_that_may_fail_are_no_fault(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(RIGHT + "try:\n    import rich\nexcept ImportError:\n    rich = None\n")
    assert upload_faults(path) == []


# ---- The command ----


def _verify(*arguments: str):
    return CliRunner().invoke(app, ["verify", *arguments, "--device", "cpu"])


def test_the_command_prints_and_writes_what_it_found(tmp_path):
    path = MUTANTS["masks one token too many"].write(tmp_path)
    result = _verify(str(path), "--case", "2x256", "--seed", "7", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "verify: fail" or "verify: fail" in result.stdout.splitlines()[-1]
    assert "every token counts fails: some tokens are never read" in result.output
    assert "the last token of each sequence" in result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["scope"]["seed"] == 7
    assert [check["name"] for check in written["checks"]] == list(CHECKS)
    assert not next(check for check in written["checks"] if check["name"] == "tokens")["ok"]


def test_ours_passes_from_the_command_line():
    result = _verify("--case", "2x256", "--check", "exact", "--check", "upload", "--quick")
    assert result.exit_code == 0, result.output
    assert "verify: pass" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--check", "speed"), "unknown check 'speed': expected one of exact, tokens"),
        (("--case", "0x5"), "expected BATCHxKV_SEQ_LEN"),
        (("--table", "v51"), "unknown table 'v51'"),
        (("nowhere.py",), "no submission at"),
        (("--json", "nowhere/out.json"), "there is no folder"),
    ],
)
def test_wrong_usage_is_one_clear_line(arguments, says):
    result = _verify(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_a_file_that_takes_its_process_down_fails_each_check(tmp_path):
    path = tmp_path / "dies.py"
    path.write_text(
        RIGHT.replace("kept = {}\n", "kept = {}\nimport os\n").replace("    return output", "    os._exit(3)")
    )
    result = _verify(str(path), "--case", "1x64", "--check", "exact", "--check", "upload")
    assert result.exit_code == 1
    assert "the worker process died (exit code 3)" in result.output
    assert "rules of the upload holds" in " ".join(result.output.split())


def test_a_file_that_hangs_is_ended(tmp_path):
    path = tmp_path / "hangs.py"
    path.write_text(RIGHT.replace("    return output", "    while True: pass"))
    arguments = ("--case", "1x64", "--check", "exact", "--check", "deterministic", "--check", "upload", "--limit", "3")
    result = _verify(str(path), *arguments)
    assert result.exit_code == 1
    assert "no answer for 3 s while calling the submission: it was ended" in result.output
    assert "not tried, since it hung before, in 'exact'" in result.output
    assert "rules of the upload holds" in " ".join(result.output.split())


def test_another_device_is_tried_in_a_process_of_its_own(tmp_path):
    """A file that takes the process down there is no worse for it; one that comes back with stale state is."""
    dies = tmp_path / "dies.py"
    dies.write_text(
        RIGHT.replace("kept = {}\n", "kept = {}\nimport os\n").replace(KV, "    q.is_cpu or os._exit(3)\n" + KV)
    )
    stale = MUTANTS["keeps metadata whatever the device"].write(tmp_path)
    arguments = ("--case", "1x64", "--check", "fresh")
    result = _verify(str(dies), *arguments)
    assert result.exit_code == 0, result.output
    assert "ends the process" in result.output
    result = _verify(str(stale), *arguments)
    assert result.exit_code == 1
    assert "after a call on" in result.output


@on_gpu
def test_waiting_for_the_gpu_is_noted(tmp_path, subject_of):
    path = tmp_path / "waits.py"
    for line, waits in (("", False), ("    output.sum().item()\n", True), ("    torch.cuda.synchronize()\n", True)):
        path.write_text(RIGHT.replace(RETURN, line + RETURN))
        outcome = run_check("deterministic", subject_of(path, "cuda:0"), SCOPE)
        assert outcome.ok, outcome.findings
        assert ("makes the host wait for the GPU" in outcome.note) == waits
