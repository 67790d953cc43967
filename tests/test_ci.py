"""The workflow on GitHub: it can be read, does what .ci/run does, and asks for nothing that a fork has not."""

import os
import subprocess
import sys

import pytest
import yaml

from bench.basics import PROJECT_ROOT

WORKFLOW = PROJECT_ROOT / ".github/workflows/ci.yml"


@pytest.fixture(scope="module")
def workflow() -> dict:
    return yaml.safe_load(WORKFLOW.read_text())


@pytest.fixture(scope="module")
def job(workflow) -> dict:
    (job,) = workflow["jobs"].values()
    return job


def place(job: dict, words: str) -> int:
    """Which step has these words in what it runs or uses."""
    (found,) = [i for i, step in enumerate(job["steps"]) if words in step.get("run", step.get("uses", ""))]
    return found


def test_a_push_and_a_pull_request_start_it(workflow):
    assert {"push", "pull_request"} <= set(workflow["on"])


def test_it_ends_with_what_ci_runs_here(job):
    assert job["steps"][-1]["run"] == ".ci/run"
    assert os.access(PROJECT_ROOT / ".ci/run", os.X_OK)


def test_it_runs_on_linux_within_a_limit(job):
    assert job["runs-on"].startswith("ubuntu-")
    assert 10 <= job["timeout-minutes"] <= 60


def test_the_checkout_has_the_history(job):
    assert job["steps"][place(job, "actions/checkout@")]["with"]["fetch-depth"] == 0


def test_python_is_one_that_the_project_is_tested_with(job):
    python = job["steps"][place(job, "actions/setup-python@")]["with"]
    assert python["python-version"] == "3.11"  # as text: 3.10 as a number would be 3.1
    assert all((PROJECT_ROOT / name).is_file() for name in python["cache-dependency-path"].split("\n") if name)


def test_a_cpu_torch_is_there_before_make_looks_for_one(job):
    step = place(job, "whl/cpu torch")
    assert "--constraint constraints.txt" in job["steps"][step]["run"]
    assert place(job, "actions/setup-python@") < step < place(job, ".ci/run")


def test_it_needs_no_secret_and_may_only_read(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets" not in WORKFLOW.read_text().partition("\nname:")[2]


def test_its_commands_are_bash(job):
    for step in job["steps"]:
        if "run" in step:
            assert subprocess.run(["bash", "-n", "-c", step["run"]], check=False).returncode == 0


def test_messages_are_not_coloured_there(tmp_path):
    """Typer colours them wherever GITHUB_ACTIONS is set; tests/conftest.py takes that back before typer is imported."""
    test = tmp_path / "test_messages.py"
    test.write_text(
        "from tests.conftest import *\n"
        "def test_plain():\n"
        "    from typer.testing import CliRunner\n"
        "    from bench.cli import app\n"
        "    assert '\\x1b' not in CliRunner().invoke(app, ['run', '--no-such-option']).output\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    environment = os.environ | {"GITHUB_ACTIONS": "true", "PYTHONPATH": str(PROJECT_ROOT)}
    child = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout
