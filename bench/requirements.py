"""What the commands need that may be missing, and how to get it, in one line."""

import re

from bench.basics import UserError
from bench.versions import torch_facts

# By what is imported, in the terms of pyproject.toml. torch stands here because it is left to the machine.
_PACKAGES = {
    "elftools": "pyelftools>=0.31,<1",
    "matplotlib": "matplotlib>=3.8,<4",
    "ml_dtypes": "ml_dtypes>=0.5,<1",
    "msgpack": "msgpack>=1,<2",
    "numpy": "numpy>=1.26,<3",
    "rich": "rich>=13.7,<16",
    "tinygrad": "tinygrad>=0.14,<0.15",
    "torch": "torch>=2.8",
    "triton": "triton>=3.6,<4",
    "typer": "typer>=0.15,<1",
}
_NOTES = {
    "tinygrad": "; it needs Python 3.11 or later",
    "torch": ", or for a GPU the build that pytorch.org names for it",
    "triton": ", on Linux",
}
_OLDEST_TORCH = 2, 8


def missing(command: str, error: ImportError) -> UserError:
    """The error of a command whose module, or one that it needs, cannot be imported."""
    package = (error.name or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _PACKAGES:
        return UserError(f"`mla {command}` cannot be loaded: {error}")
    return UserError(
        f"`mla {command}` needs {package}, which is not installed here: pip install '{_PACKAGES[package]}'"
        + _NOTES.get(package, "")
    )


def check_torch() -> None:
    """Raises UserError for a torch too old to import what reads it. Without torch, importing it says so."""
    found = torch_facts().get("__version__", "")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        raise UserError(f"torch {found} is too old: 2.8 or later is needed, pip install '{_PACKAGES['torch']}'")
