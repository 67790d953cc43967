"""Which `aiter` this process uses, decided once.

AMD's aiter runs only on ROCm. Everywhere else the package `portable/aiter` stands in for it. Programs that are not ours
get the same with `PYTHONPATH=portable`; ours call `choose_aiter()` before their first `import aiter`.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import torch

_HERE = Path(__file__).resolve().parent

# What reference.ref_kernel passes by keyword; aiter versions before the contest lack some of them.
_NEEDED = ("page_size", "num_kv_splits", "work_meta_data", "q_scale", "kv_scale", "intra_batch_mode")

_INSTALL = (
    "install AMD's aiter from https://github.com/ROCm/aiter (the contest used commit f3be04a1; PyPI's amd-aiter 0.1.7 "
    "is too old and PyPI's aiter is an unrelated package)"
)


@functools.cache
def choose_aiter() -> ModuleType:
    """Make `import aiter` mean the right package and return it.

    On ROCm (`torch.version.hip` is set): the installed aiter, if its mla_decode_fwd takes the parameters we call it
    with. Elsewhere: portable/aiter, put first on sys.path; an `aiter` imported before from anywhere else is thrown out.

    Raises RuntimeError on ROCm when no usable aiter is installed, saying what to install.
    """
    return _installed() if torch.version.hip else _portable()


def _portable() -> ModuleType:
    loaded = sys.modules.get("aiter")
    if loaded is not None and _HERE not in Path(getattr(loaded, "__file__", None) or "/").resolve().parents:
        for name in [n for n in sys.modules if n == "aiter" or n.startswith("aiter.")]:
            del sys.modules[name]
    if sys.path[:1] != [str(_HERE)]:
        sys.path.insert(0, str(_HERE))
    importlib.invalidate_caches()
    return importlib.import_module("aiter")


def _installed() -> ModuleType:
    if importlib.util.find_spec("aiter") is None:
        raise RuntimeError(f"aiter is not installed for this ROCm torch: {_INSTALL}")
    try:
        aiter = importlib.import_module("aiter")
        parameters = inspect.signature(importlib.import_module("aiter.mla").mla_decode_fwd).parameters
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"the aiter found here has no MLA decode ({error}): {_INSTALL}") from error
    missing = [name for name in _NEEDED if name not in parameters]
    if missing:
        raise RuntimeError(f"aiter.mla.mla_decode_fwd lacks the parameters {', '.join(missing)}: {_INSTALL}")
    return aiter
