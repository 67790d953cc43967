"""What all tests share: the device, poisoned uninitialised memory, and empty caches."""

import os
import sys

import pytest
import torch

import reference
import submission

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
def _same_submission(monkeypatch):
    """The tools load files under the module name `submission`; every test starts with the one imported here."""
    monkeypatch.setitem(sys.modules, "submission", submission)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_portable = pytest.mark.skipif(
    torch.version.hip is not None, reason="AMD's own aiter is in use, not the portable one"
)
