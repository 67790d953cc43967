"""What is missing is named in one line, with how to get it; a command that needs none of it works."""

import json
import subprocess
import sys

import pytest
from typer.main import get_command

from bench import requirements
from bench.basics import PROJECT_ROOT, UserError
from bench.cli import app

COMMANDS = {
    "run": [],
    "verify": [],
    "explain": ["64", "8192"],
    "compare": [],
    "roofline": ["results.csv", "--out", "roofline.png"],
    "cost": [],
    "sanitize": [],
    "popcorn": ["test", "cases.txt"],
    "isa run": ["kernels.py:scale"],
    "isa plan": ["64", "8192"],
}
GFX950 = ("elftools", "ml_dtypes", "msgpack", "tinygrad", "triton")
# Calls the command line for each list of arguments, in a process that has none of the packages.
CODE = """
import json, sys
arguments, packages = map(json.loads, sys.argv[1:])
for package in packages:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None
from typer.testing import CliRunner
from bench.cli import app
results = [CliRunner(env={"COLUMNS": "150"}).invoke(app, given) for given in arguments]
print(json.dumps([(result.exit_code, result.stdout, result.stderr) for result in results]))
"""


def call(arguments: list[list[str]], without: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    command = [sys.executable, "-c", CODE, json.dumps(arguments), json.dumps(without)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT_ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(command, before: str = "") -> set[str]:
    inner = getattr(command, "commands", None)
    return {before.strip()} if inner is None else set().union(*(names(c, f"{before} {n}") for n, c in inner.items()))


def test_every_command_is_tried_here():
    assert names(get_command(app)) == set(COMMANDS)


def test_without_torch_every_command_ends_in_a_line():
    called = call([[*command.split(), *given] for command, given in COMMANDS.items()], ["torch"])
    for command, (exit_code, stdout, stderr) in zip(COMMANDS, called, strict=True):
        assert (exit_code, stdout) == (2, ""), command
        assert stderr.startswith(f"error: `mla {command.split()[0]}` needs ")
        assert "torch" in stderr.partition("which")[0]
        assert "'torch>=2.8'" in stderr
        assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "without", "words"),
    [
        (
            "compare",
            ["triton"],
            "needs triton, which is not installed here: pip install 'triton>=3.6,<4'; Triton is for",
        ),
        ("roofline", ["matplotlib"], "needs matplotlib, which is not installed here: pip install 'matplotlib>="),
        ("isa run", ["tinygrad"], "needs tinygrad, which is not installed here: pip install 'tinygrad>=0.14,<0.15'; t"),
    ],
)
def test_what_a_command_lacks_is_named(command, without, words):
    ((exit_code, stdout, stderr),) = call([[*command.split(), *COMMANDS[command]]], without)
    assert (exit_code, stdout) == (2, "")
    assert words in stderr
    assert "Traceback" not in stderr
    assert stderr.count("\n") == 1


def test_all_that_isa_lacks_is_named_at_once():
    ((_, _, stderr),) = call([["isa", "plan", "64", "8192"]], ["torch", *GFX950])
    assert "needs elftools, ml_dtypes, msgpack, tinygrad, torch, triton, which are not installed here: pip" in stderr
    specs = "'pyelftools>=0.31,<1' 'ml_dtypes>=0.5,<1' 'msgpack>=1,<2' 'tinygrad>=0.14,<0.15' 'torch>=2.8' 'triton>="
    assert specs in stderr


def test_the_command_line_itself_may_be_missing():
    code = "import runpy, sys; sys.modules['typer'] = None; runpy.run_module('bench', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PROJECT_ROOT, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: `python -m bench` needs typer, which is not installed here: pip install 'typer>=0.15,<1'\n"
    )


@pytest.mark.parametrize("found", ["2.7.1+cpu", "1.13.0"])
def test_an_old_torch_is_refused(monkeypatch, found):
    monkeypatch.setattr(requirements, "torch_facts", lambda: {"__version__": found})
    with pytest.raises(UserError, match=rf"torch {found.replace('+', '.')} is too old: 2\.8 or later"):
        requirements.check_torch()


@pytest.mark.parametrize(
    "found", [{"__version__": "2.8.0"}, {"__version__": "2.13.0a0+git1"}, {"__version__": "3.0"}, {}]
)
def test_another_torch_is_not(monkeypatch, found):
    monkeypatch.setattr(requirements, "torch_facts", lambda: found)
    requirements.check_torch()


def test_a_module_that_is_broken_is_not_called_missing():
    error = requirements.missing("mla run", ImportError("cannot import name 'x'", name="torch"))
    assert str(error) == "`mla run` cannot be loaded: cannot import name 'x'"


def test_the_packages_are_those_of_pyproject():
    declared = (PROJECT_ROOT / "pyproject.toml").read_text()
    for spec, _ in requirements._PACKAGES.values():
        assert f'"{spec}' in declared, spec
