"""What `pip install .` installs: every module of the project, and a command line that works from there."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bench
from bench.basics import PROJECT_ROOT

BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what the project is built from, so that the build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    packages = [path.parent for path in PROJECT_ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    for package in packages:
        shutil.copytree(package, copy / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    others = [PROJECT_ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    for path in [*PROJECT_ROOT.glob("*.py"), *others]:
        shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def site(source, tmp_path_factory) -> Path:
    """The wheel, unpacked as an installer does."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def mla(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command line as it is in `site`, called in `folder`, outside any checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def modules(folder: Path) -> set[str]:
    """The Python files below it, but for the copies that a build makes."""
    files = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return {str(file) for file in files if file.parts[0] != "build"}


def test_every_module_is_in_it(source, site):
    assert modules(site) == modules(source)
    assert {"submission.py", "bench/cli.py", "portable/aiter/utility/fp4_utils.py"} <= modules(site)


def test_the_command_line_is_in_it(site):
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    assert "mla = bench.cli:main" in entry_points.read_text()


def test_it_runs_the_submission_that_it_holds(site, tmp_path):
    done = mla(site, tmp_path, "run", "--case", "1x64", "--device", "cpu", "--json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["submission"] == str(site / "submission.py")
    assert written["environment"]["git_commit"] is None
    if written["environment"]["hip"] is None:
        assert written["environment"]["aiter"] == "portable"


def test_it_tells_its_version(site, tmp_path):
    done = mla(site, tmp_path, "--version")
    assert done.stdout.splitlines()[:2] == [f"mla     {bench.__version__}", "commit  none"]
