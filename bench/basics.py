"""What the command line and everything behind it share, and which loads nothing: modes, paths, errors."""

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


class UserError(Exception):
    """A mistake of the caller: the message says what was wrong, what was expected and what to do."""

    exit_code = 2


class CaseFileError(UserError):
    """A case file that cannot be read."""

    exit_code = 113


class NoPopcornDescriptorError(UserError):
    """POPCORN_FD is unset or names nothing that can be written to."""

    exit_code = 111
