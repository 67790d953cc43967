"""What the command line and everything behind it share, and which loads nothing: modes, paths, errors."""

from collections.abc import Iterable
from enum import Enum
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parent.parent
PROJECT_SUBMISSION = PROJECT_ROOT / "submission.py"


class Mode(str, Enum):
    """What is done with each case."""

    TEST = "test"
    BENCHMARK = "benchmark"
    LEADERBOARD = "leaderboard"
    PROFILE = "profile"


LIMIT_SECONDS = 300.0  # that a call of a submission may take, unless --limit says otherwise


class UserError(Exception):
    """A mistake of the caller: the message says what was wrong, what was expected and what to do."""

    exit_code = 2


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is none of those known."""
    return UserError(f"unknown {what} {name!r}: expected one of {', '.join(known)}")


class CaseFileError(UserError):
    """A case file that cannot be read."""

    exit_code = 113


class NoPopcornDescriptorError(UserError):
    """POPCORN_FD is unset or names nothing that can be written to."""

    exit_code = 111
