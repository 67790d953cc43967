"""Result files: before any work it is known whether one can be written; then it is written whole or not at all."""

import hashlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from bench.basics import UserError


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_target(path: Path, option: str = "--json") -> None:
    """Raises UserError if `path`, the file that `option` names, could not be written in the end."""
    path = path.resolve()
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}: create it first")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: expected the name of a file")
    try:
        if path.exists() and not path.is_file():
            return
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{option} {path}: the folder {path.parent} is not writable ({error})") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As write_text; infinity and NaN become strings."""
    write_text(path, json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str, option: str = "--json") -> None:
    """As write_bytes, in UTF-8."""
    write_bytes(path, text.encode(), option)


def write_bytes(path: Path, content: bytes, option: str) -> None:
    """Write all of it or nothing, to the file that `option` names: a reader never sees half a file.

    A link is followed; what is no regular file, such as a pipe, is written to as it is. Raises UserError if that fails.
    """
    path = path.resolve()
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error}") from error


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
