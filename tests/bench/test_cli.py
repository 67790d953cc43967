"""The command line: what `mla run` and `mla explain` print, write and return, and how they refuse."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import submission as project
from bench.basics import PROJECT_SUBMISSION, Mode, UserError
from bench.cli import app
from bench.show import results
from bench.show.console import console as new_console
from bench.show.files import check_target, write_json
from bench.show.texts import plan_text, time_text
from bench.traffic import BANDWIDTHS
from bench.worker import process as worker
from bench.worker.protocol import CaseResult, Job, Stats
from reference import PRECISIONS, ExactVerdict, OfficialVerdict
from task import TestSpec
from tests.conftest import on_portable

LOOSE = "from reference import ref_kernel\ndef custom_kernel(data):\n    return ref_kernel(data) + 0.05\n"
# Raises, takes its process down, or is right, by batch size.
UNSTEADY = """
import os
from reference import ref_kernel
def custom_kernel(data):
    batch = data[4]["batch_size"]
    if batch == 2:
        raise RuntimeError("no [bold]luck[/bold]")
    if batch == 3:
        os._exit(7)
    return ref_kernel(data)
"""


def mla(*arguments: object):
    return CliRunner(env={"COLUMNS": "150"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def write(tmp_path):
    """A function that writes a submission's source to a file."""

    def write(source: str) -> Path:
        path = tmp_path / "somebody.py"
        path.write_text(source)
        return path

    return write


# ---- mla run ----


@on_portable
def test_the_projects_own_submission_passes(tmp_path):
    result = mla("run", "--case", "2x256", "--device", "cpu", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "2 × 256" in line)
    expected = project.explain(2, 256)
    assert plan_text(expected.plan) in row
    assert "pass 0.00%" in row
    assert f"pass {expected.precision}" in row
    assert "says nothing about a GPU" in result.stdout
    assert result.stdout.splitlines()[-1] == "check: pass"
    assert "[1/1] 2 × 256" in result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["check"], written["mode"]) == ("pass", "test")
    assert written["environment"]["torch"] == torch.__version__
    (case,) = written["cases"]
    assert (case["batchsize"], case["kvseqlen"], case["seed"]) == (2, 256, 1)
    assert case["plan"] == {"text": plan_text(expected.plan), "page_size": 1, "precision": expected.precision}
    assert case["exact"]["kernel_error"] < PRECISIONS[expected.precision].kernel_budget
    assert case["floor_ns"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@on_portable
def test_v50_passes_officially_and_fails_exactly():
    result = mla("run", "--table", "v50", "--case", "4x8192", "--device", "cpu")
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if line.strip().startswith("4 × 8192 "))
    assert "page size 8" in row
    assert "pass" in row
    assert "FAIL a16w8" in row
    assert "4 × 8192 (8)" in result.stdout
    assert "the first token of each page" in " ".join(result.stdout.split())
    assert "4 × 8192: exact check: gate A" in result.stdout
    assert result.stdout.splitlines()[-1] == "check: fail"


@on_portable
def test_failures_are_told_and_the_other_cases_still_run(write):
    shapes = [option for shape in ("2x256", "3x256", "1x256") for option in ("--case", shape)]
    result = mla("run", write(UNSTEADY), *shapes, "--device", "cpu")
    assert result.exit_code == 1
    assert "2 × 256: RuntimeError: no [bold]luck[/bold] (somebody.py, line 7, in custom_kernel)" in result.stdout
    assert "3 × 256: the worker process died (exit code 7) while running the submission" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.strip().startswith("1 × 256"))
    assert "pass a8w8_tensor" in row
    assert "–" in row  # no plan is told


@on_portable
def test_quick_benchmark_times_and_averages(write, tmp_path):
    arguments = ["--mode", "benchmark", "--quick", "--case", "64x256", "--case", "9x200", "--device", "cpu"]
    result = mla("run", write(LOOSE), *arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 1  # officially right, but not exact
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(case["batchsize"], case["kvseqlen"]) for case in written["cases"]] == [(4, 256), (4, 200)]
    assert all(3 <= case["stats"]["runs"] <= 10 for case in written["cases"])
    first, second = (case["stats"]["mean"] for case in written["cases"])
    assert written["geomean_ns"] == pytest.approx(math.sqrt(first * second))
    assert [case["official"]["ok"] for case in written["cases"]] == [True, True]
    assert f"geometric mean: {time_text(written['geomean_ns'])}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none.py"], "no submission at"),
        (["{loose}", "--table", "v50"], "has no tables to choose from"),
        ([str(PROJECT_SUBMISSION), "--table", "v49"], "unknown table 'v49'"),
        (["--case", "64"], "case '64': expected BATCHxKV_SEQ_LEN"),
        (["--json", "{folder}/none/out.json"], "there is no folder"),
        (["--json", "{folder}"], "is a folder: expected the name of a file"),
        (["--device", "tpu9"], "unknown device 'tpu9'"),
        (["--mode", "race"], "'race' is not one of"),
    ],
)
def test_wrong_use_of_run(write, tmp_path, arguments, complaint):
    loose = write(LOOSE)
    result = mla("run", *(argument.format(loose=loose, folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.output
    assert "×" not in result.output  # no case was begun


def test_a_submission_that_ends_its_process_when_loaded(write):
    with pytest.raises(UserError, match=r"cannot be loaded: the worker process died \(exit code 9\)"):
        worker.Worker(write("import os\nos._exit(9)\n")).__enter__()


def test_a_killed_worker_is_named_and_replaced(write):
    source = LOOSE.replace("    return", "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n    return")
    case = TestSpec(batchsize=1, qseqlen=1, kvseqlen=256, seed=1)
    with worker.Worker(write(source), "cpu") as process:
        heard = []
        result = process.run(Job(Mode.TEST, case), lambda what, share: heard.append(what))
        assert result.error == "the worker process died (SIGKILL, often a lack of memory) while running the submission"
        assert "copying the data" in heard
        assert process.request("describe", [case], None).plans == [None]


# ---- tables and JSON ----


def row(mean: float | None, **changes: object) -> results.Row:
    stats = Stats(3, mean, 1.0, mean / 100, mean, mean) if mean else None
    official = OfficialVerdict(True, 0.0123, "")
    exact = ExactVerdict(False, "a8w8", math.inf, None, 0.5, 0, "gate A: far off")
    result = CaseResult(official, exact, cache="fp8", stats=stats)
    case = TestSpec(batchsize=256, qseqlen=1, kvseqlen=8192, seed=1)
    return results.Row(case, None, CaseResult(**{**vars(result), **changes}))


def printed(rows: list[results.Row], mode: Mode, device: str) -> str:
    console = new_console()
    with console.capture() as captured:
        results.print_results(console, rows, mode, device)
    return captured.get()


def test_times_stand_beside_the_floor_of_a_known_device():
    text = printed([row(305e3)], Mode.BENCHMARK, "AMD Instinct MI355X (gfx950)")
    assert "MI355X's 8 TB/s (datasheet)" in text
    cells = next(line for line in text.splitlines() if line.strip().startswith("256 × 8192 "))
    assert "305 µs ±1.0%" in cells
    assert "152 µs" in cells  # 1.217 GB at 8 TB/s
    assert cells.split()[-1] == "2.01"
    assert "FAIL (a8w8?)" in cells
    assert "1.23%" in cells
    assert "geometric mean: 305 µs" in text


def test_an_unknown_device_has_no_floor():
    text = printed([row(305e3)], Mode.BENCHMARK, "cpu (some, 2 cores)")
    assert "floor" not in text


def test_no_mean_without_every_time():
    text = printed([row(1e6), row(None, error="RuntimeError: boom")], Mode.LEADERBOARD, "cpu")
    assert "no geometric mean: 1 of 2 cases have no time" in text
    assert "256 × 8192: RuntimeError: boom" in text


@pytest.mark.parametrize(
    ("ns", "text"), [(1234, "1.23 µs"), (123_456, "123 µs"), (999_400, "999 µs"), (2.5e6, "2.5 ms"), (3.7e10, "37 s")]
)
def test_time_text(ns, text):
    assert time_text(ns) == text


def test_json_holds_what_json_cannot(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"cases": results.rows_as_json([row(1e6)], BANDWIDTHS[0])})
    (case,) = json.loads(path.read_text())["cases"]
    assert case["exact"]["kernel_error"] == "inf"
    assert case["exact"]["format_error"] is None
    assert case["ok"] is False
    assert case["floor_ns"] == pytest.approx(1.2169e9 / 8e12 * 1e9, rel=1e-3)


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    write_json(path, {"run": 1})

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(UserError, match="no space left"):
        write_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_json_follows_links_and_writes_to_what_is_no_file(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    write_json(tmp_path / "link.json", {"run": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text()) == {"run": 1}
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_target(tmp_path / "pipe")
    write_json(tmp_path / "pipe", {"run": 2})
    assert json.loads(os.read(reader, 1000)) == {"run": 2}
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_json_where_nothing_can_be_written_is_refused_at_once():
    with pytest.raises(UserError, match="is not writable"):
        check_target(Path("/proc/out.json"))


# ---- mla explain ----


def test_explain_counts_the_bytes_of_an_entry():
    result = mla("explain", 64, 8192, "--table", "gfx950", "--json")
    assert result.exit_code == 0
    explained = json.loads(result.stdout)
    plan = project.GFX950_TABLE[64, 8192]
    assert explained["plan"]["runner"] == plan.runner
    assert explained["launches"] == list(project.explain(64, 8192, table="gfx950").kernels)
    assert explained["bytes"]["cache"] == 64 * 8192 * 576
    assert explained["bytes"]["partials"] == 64 * plan.num_splits * 16 * 513 * 8
    floors = {floor["device"]: floor["floor_ns"] for floor in explained["floors"]}
    assert floors["MI355X"] == pytest.approx(304_218_112 / 8e3)
    assert floors["H200"] == pytest.approx(304_218_112 / 4.3e3)


def test_explain_prints_plan_reason_and_floors():
    result = mla("explain", 4, 8192, "--table", "v50")
    assert result.exit_code == 0
    for expected in ("a16w8_persistent, 16 splits, page size 8", "table v50", "2,359,296", "MI355X"):
        assert expected in result.stdout
    assert "first token of each page" in result.stdout
    assert "kernels_honour_page_size=True" in result.stdout


def test_explain_says_when_partials_are_unknown():
    result = mla("explain", 4, 1024, "--table", "v50")
    assert "aiter picks the splits" in result.stdout
    assert "4,718,592" in result.stdout  # 4 × 1024 × 1152


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["0", "8192"], "BATCH must be 1 or more, got 0"),
        (["64", "-1"], "KV_SEQ_LEN must be 1 or more, got -1"),
        (["64", "8192", "--table", "v49"], "unknown table 'v49'"),
        (["64", "many"], "Invalid value for 'KV_SEQ_LEN'"),
        (["64"], "Missing argument"),
    ],
)
def test_wrong_use_of_explain(arguments, complaint):
    result = mla("explain", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.parametrize("command", [[], ["run"], ["popcorn"], ["explain"]])
def test_help_needs_no_torch(command):
    code = "import sys; sys.modules['torch'] = None; from bench.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout
