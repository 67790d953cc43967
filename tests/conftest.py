"""What all tests share: the device, poisoned uninitialised memory, empty caches, and when a test can run."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import reference
import sm_90
import submission

sm_90.install()
# On GitHub typer colours its messages, escape codes within words: not what tests, or programs that they start, expect.
for _variable in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(_variable, None)
# The tensors here are small: one thread is as fast, and other work on the machine cannot stall it.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return reference.default_device()


@pytest.fixture(autouse=True, scope="session")
def _uninitialised_memory_is_poison():
    """torch.empty hands out NaN (or the largest integer), so reading what nobody wrote shows."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _empty_caches():
    submission.clear_caches()
    yield
    submission.clear_caches()


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    """Tables are as wide as in a log; pytest-xdist tells its workers a width."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _same_submission(monkeypatch):
    """The tools load files under the module name `submission`; every test starts with the one imported here."""
    monkeypatch.setitem(sys.modules, "submission", submission)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HOPPER = torch.cuda.is_available() and sm_90.can_run(torch.device("cuda"))
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs an sm_90 GPU and Triton 3.6 or later")
on_portable = pytest.mark.skipif(
    torch.version.hip is not None, reason="AMD's own aiter is in use, not the portable one"
)

# Triton's own functions are interpreted only if TRITON_INTERPRET was set before it was imported: a file with tests of
# that kind runs itself once more in a process of its own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_rest_of_this_file")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is that process")


def run_interpreted(file: str) -> None:
    """Run the tests of `file` in a process in which Triton interprets; they must pass, and be some."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout[-6000:]
    assert " passed" in child.stdout


@contextlib.contextmanager
def waiting_for_the_gpu_fails() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
