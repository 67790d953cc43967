"""Which versions are here, read from what is installed: nothing is imported for it, so it takes no time."""

import importlib.metadata
import importlib.util
import runpy
import subprocess
from pathlib import Path
from typing import Any

from bench import __version__
from bench.basics import PROJECT_ROOT

# A package by what is imported: the distributions that bring it. PyTorch's ROCm builds bring a Triton of their own.
_DISTRIBUTIONS = {
    "triton": ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton"),
    "aiter": ("amd-aiter", "aiter"),
}


def version(package: str) -> str | None:
    """Of an installed package, None where it is not there."""
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def git_commit() -> str | None:
    """The commit of this project, "-dirty" after it where tracked files differ; None where this is no checkout of it,
    as where it was installed, be that below some other project's checkout."""
    if not (PROJECT_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(PROJECT_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def torch_facts() -> dict[str, Any]:
    """torch's own version.py (__version__, cuda, hip, …), empty without torch."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(file)) if file and file.is_file() else {}


def summary() -> dict[str, str]:
    """What `mla --version` prints."""
    torch = torch_facts()
    # AMD's aiter runs on ROCm only, see portable/__init__.py.
    aiter = version("aiter") if torch.get("hip") else "portable"
    found = {
        "mla": __version__,
        "commit": git_commit(),
        "torch": torch.get("__version__"),
        "triton": version("triton"),
        "aiter": aiter,
    }
    return {name: value or "none" for name, value in found.items()}
