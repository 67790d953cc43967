"""A Python file of somebody's, run as a module, and where in it an error came from."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from bench.basics import UserError


def execute(path: Path, name: str) -> ModuleType:
    """Run a file as the module `name`. Raises UserError if it is no Python file, and whatever the file raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"{path} is no Python file: expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def describe_error(error: BaseException, path: Path) -> str:
    """The error and the last place in the file at `path` it passed through."""
    where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f" ({path.name}, line {where[-1].lineno}, in {where[-1].name})" if where else ""
    return f"{type(error).__name__}: {error}{place}"
