"""The machine-readable form: lines, their order, exit codes, and what the server would not survive."""

import base64
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.basics import PROJECT_ROOT, Mode, UserError
from bench.cli import app
from bench.commands import popcorn
from bench.worker.protocol import Limits

CASE = "batchsize: {}; qseqlen: 1; kvseqlen: 256; seed: 3"
GOOD, RAISES, DIES, LOOSE = 1, 2, 3, 4  # by batch size

# Right where it has to be, each in its own way; keeps outputs, so that timed calls on the same data are short.
SUBMISSION = f"""
import os
from reference import ref_kernel
kept = {{}}
def custom_kernel(data):
    batch = data[4]["batch_size"]
    if batch == {RAISES}:
        raise RuntimeError("first line\\nsecond line")
    if batch == {DIES}:
        os._exit(7)
    if batch not in kept:
        kept[batch] = ref_kernel(data) + (0.05 if batch == {LOOSE} else 0)
    return kept[batch].clone()
"""


@pytest.fixture
def submission(tmp_path) -> Path:
    path = tmp_path / "somebody.py"
    path.write_text(SUBMISSION)
    return path


@pytest.fixture
def case_file(tmp_path):
    """A function that writes a case file for some batch sizes."""

    def write(*batch_sizes: int) -> Path:
        path = tmp_path / "cases.txt"
        path.write_text("".join(CASE.format(batch) + "\n" for batch in batch_sizes))
        return path

    return write


@pytest.fixture
def mirror(tmp_path, submission, case_file, monkeypatch):
    """A function that runs a mode in this process (the worker is a process of its own): (exit code, lines)."""

    def run(mode: Mode, *batch_sizes: int, **environment: str) -> tuple[int, list[tuple[str, str]]]:
        with open(tmp_path / "out", "w") as file:
            for name, value in {"POPCORN_FD": str(os.dup(file.fileno())), **environment}.items():
                monkeypatch.setenv(name, value)
            code = popcorn.run(mode, case_file(*batch_sizes), submission)
        lines = (tmp_path / "out").read_text().splitlines()
        return code, [tuple(line.split(": ", 1)) for line in lines]

    return run


def test_a_descriptor_open_for_reading_only_is_refused(tmp_path, case_file):
    (tmp_path / "in").touch()
    descriptor = os.open(tmp_path / "in", os.O_RDONLY)
    environment = {"POPCORN_FD": str(descriptor)}
    result = CliRunner(env=environment).invoke(app, ["popcorn", "test", str(case_file(GOOD))])
    with contextlib.suppress(OSError):
        os.close(descriptor)
    assert result.exit_code == 111
    assert "cannot be written to" in result.output


def test_the_command_writes_to_its_descriptor(tmp_path, submission, case_file):
    """All the way: python -m bench, the caller's descriptor, failures of every kind, and the next case still runs."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "bench", "popcorn", "test", case_file(GOOD, RAISES, DIES, LOOSE)]
    process = subprocess.run(
        [*command, "--submission", submission],
        env={**os.environ, "POPCORN_FD": str(writer)},
        pass_fds=[writer],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    os.close(writer)
    with os.fdopen(reader) as file:
        lines = [line.split(": ", 1) for line in file.read().splitlines()]
    assert process.returncode == 112, process.stderr
    assert [key for key, _ in lines] == [
        "test-count",
        *("test.0.spec", "test.0.status", "test.0.message"),
        *("test.1.spec", "test.1.status", "test.1.error"),
        *("test.2.spec", "test.2.status", "test.2.error"),
        *("test.3.spec", "test.3.status", "test.3.message"),
        "check",
    ]
    values = dict(lines)
    assert values["test-count"] == "4"
    assert values["test.1.spec"] == CASE.format(RAISES)
    assert [values[f"test.{i}.status"] for i in range(4)] == ["pass", "fail", "fail", "pass"]
    assert values["test.1.error"].startswith("RuntimeError: first line\\nsecond line (somebody.py, line 8")
    assert "died (exit code 7) while running the submission" in values["test.2.error"]
    assert values["check"] == "fail"


def test_a_passing_test_run(mirror):
    code, lines = mirror(Mode.TEST, GOOD)
    assert code == 0
    assert lines[-1] == ("check", "pass")
    assert ("test.0.status", "pass") in lines


STATISTICS = ["runs", "mean", "std", "err", "best", "worst"]


def test_benchmark(mirror):
    code, lines = mirror(Mode.BENCHMARK, GOOD, RAISES)
    assert code == 112
    assert [key for key, _ in lines] == [
        "benchmark-count",
        "benchmark.0.spec",
        *(f"benchmark.0.{name}" for name in STATISTICS),
        *("benchmark.1.spec", "benchmark.1.status", "benchmark.1.error"),
        "check",
    ]
    values = dict(lines)
    assert 3 <= int(values["benchmark.0.runs"]) <= 1000
    best, mean, worst = (float(values[f"benchmark.0.{name}"]) for name in ("best", "mean", "worst"))
    assert 0 < best <= mean <= worst
    assert values["benchmark.1.status"] == values["check"] == "fail"


def test_a_failing_leaderboard_run_stops_and_exits_with_0(mirror):
    """Kept outputs pass the first checked call and fail on fresh data."""
    code, lines = mirror(Mode.LEADERBOARD, GOOD, LOOSE)
    assert code == 0
    keys = ["benchmark-count", "benchmark.0.spec", "benchmark.0.status", "benchmark.0.error", "check"]
    assert [key for key, _ in lines] == keys
    values = dict(lines)
    assert values["benchmark-count"] == "2"
    assert "mismatch_ratio=" in values["benchmark.0.error"]
    assert values["check"] == "fail"


def test_a_passing_leaderboard_run(mirror, submission, monkeypatch):
    submission.write_text("from reference import ref_kernel as custom_kernel\n")
    monkeypatch.setitem(popcorn.TIMED, Mode.LEADERBOARD, Limits(5, 30e9))
    code, lines = mirror(Mode.LEADERBOARD, GOOD)
    assert code == 0
    keys = ["benchmark-count", "benchmark.0.spec", *(f"benchmark.0.{name}" for name in STATISTICS), "check"]
    assert [key for key, _ in lines] == keys
    assert dict(lines)["check"] == "pass"


def test_profile(mirror):
    code, lines = mirror(Mode.PROFILE, GOOD)
    assert code == 0
    assert [key for key, _ in lines] == ["benchmark-count", "benchmark.0.spec", "benchmark.0.report", "check"]
    report = base64.b64decode(dict(lines)["benchmark.0.report"], altchars=b"+*", validate=True).decode()
    assert "aten::" in report
    assert "\n" in report


def test_the_secret_seed_decides_the_data_and_stays_hidden(mirror, submission):
    submission.write_text(
        "import os\nimport reference\ndef custom_kernel(data):\n    assert 'POPCORN_SEED' not in os.environ\n"
        "    expected = reference.generate_input(1, 1, 256, 13 * 14 // 2 + 3)[0]\n"  # case seed 3, secret 10
        "    assert expected.equal(data[0]), 'drawn from another seed'\n    return reference.ref_kernel(data)\n"
    )
    assert mirror(Mode.TEST, GOOD, POPCORN_SEED="10")[0] == 0
    code, lines = mirror(Mode.TEST, GOOD)
    assert code == 112
    assert "drawn from another seed" in dict(lines)["test.0.error"]


def test_nothing_is_written_for_a_file_that_is_no_submission(mirror, submission, tmp_path):
    submission.write_text("def custom_kernel(:")
    with pytest.raises(UserError, match="SyntaxError"):
        mirror(Mode.TEST, GOOD)
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize(
    ("variables", "arguments", "code", "complaint"),
    [
        ({"POPCORN_FD": ""}, ["test", "{cases}"], 111, "POPCORN_FD is not set"),
        ({"POPCORN_FD": "999"}, ["test", "{cases}"], 111, "POPCORN_FD=999 cannot be written to"),
        ({"POPCORN_FD": "three"}, ["test", "{cases}"], 111, "POPCORN_FD=three cannot be written to"),
        ({}, ["test", "{cases}.none"], 113, "cannot read the case file"),
        ({}, ["race", "{cases}"], 2, "'race' is not one of"),
        ({}, ["test"], 2, "Missing argument"),
        ({}, [], 2, "Missing argument"),
        ({}, ["test", "{cases}", "--submission", "none.py"], 2, "no submission at"),
        ({"POPCORN_SEED": "x"}, ["test", "{cases}"], 2, "POPCORN_SEED must be a whole number, got 'x'"),
        ({"POPCORN_SEED": "8589934592"}, ["test", "{cases}"], 113, "does not fit in 64 bits"),
    ],
)
def test_exit_codes_of_wrong_use(tmp_path, case_file, variables, arguments, code, complaint):
    cases = str(case_file(GOOD))
    with open(tmp_path / "out", "w") as file:
        descriptor = os.dup(file.fileno())
        environment = {"POPCORN_FD": str(descriptor), **variables}
        result = CliRunner(env=environment).invoke(app, ["popcorn", *(a.format(cases=cases) for a in arguments)])
    with contextlib.suppress(OSError):  # closed already where the command had opened it
        os.close(descriptor)
    assert result.exit_code == code
    assert complaint in result.output
    assert (tmp_path / "out").read_text() == ""
