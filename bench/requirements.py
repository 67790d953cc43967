"""What the commands need that may be missing, and how to get it, in one line."""

import importlib.util
import re

from bench.basics import UserError
from bench.versions import torch_facts

# By what is imported, in the terms of pyproject.toml, and what has to be known to install it.
_PACKAGES = {
    "elftools": ("pyelftools>=0.31,<1", ""),
    "matplotlib": ("matplotlib>=3.8,<4", ""),
    "ml_dtypes": ("ml_dtypes>=0.5,<1", ""),
    "msgpack": ("msgpack>=1,<2", ""),
    "numpy": ("numpy>=1.26,<3", ""),
    "rich": ("rich>=13.7,<16", ""),
    "tinygrad": ("tinygrad>=0.14,<0.15", "tinygrad needs Python 3.11 or later"),
    "torch": ("torch>=2.8", "for a GPU take the build of torch that pytorch.org names for it"),
    "triton": ("triton>=3.6,<4", "Triton is for Linux"),
    "typer": ("typer>=0.15,<1", ""),
}
# What a command needs beyond the first that is found missing: all is said at once.
_TOGETHER = {"mla isa": ("elftools", "ml_dtypes", "msgpack", "tinygrad", "triton")}
_OLDEST_TORCH = 2, 8


def missing(command: str, error: ImportError) -> UserError:
    """The error of a command, as in "mla isa", whose module, or one that it needs, cannot be imported."""
    package = (error.name or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _PACKAGES:
        return UserError(f"`{command}` cannot be loaded: {error}")
    others = (name for name in _TOGETHER.get(command, ()) if not importlib.util.find_spec(name))
    lacking = sorted({package, *others})
    specs, notes = zip(*(_PACKAGES[name] for name in lacking), strict=True)
    are = "is" if len(lacking) == 1 else "are"
    install = f"pip install {' '.join(repr(spec) for spec in specs)}"
    return UserError(
        f"`{command}` needs {', '.join(lacking)}, which {are} not installed here: "
        + "; ".join([install, *filter(None, notes)])
    )


def check_torch() -> None:
    """Raises UserError for a torch too old to import what reads it. Without torch, importing it says so."""
    found = torch_facts().get("__version__", "")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        raise UserError(f"torch {found} is too old: 2.8 or later is needed, pip install '{_PACKAGES['torch'][0]}'")
