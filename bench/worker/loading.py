"""A submission loaded from a file: its custom_kernel, and whatever else it is found to offer.

Only the worker process loads one. `custom_kernel(data)` is all that a file must have; plans, tables, explanations and
the strict mode are used where they are there in the form that the project's own submission.py has them.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import sm_90
from bench.basics import PROJECT_ROOT, PROJECT_SUBMISSION, UserError, unknown
from bench.modules import describe_error, execute
from bench.show.texts import plan_text
from reference import PRECISIONS


@dataclass(frozen=True)
class PlanInfo:
    """What is shown of a plan. precision: a key of reference.PRECISIONS, None where the submission names none."""

    text: str
    page_size: int
    precision: str | None


def load(path: Path) -> "Submission":
    """Run the file as module `submission`; the project's own is given what sm_90 adds to it. Raises UserError when that
    fails or leaves no custom_kernel."""
    if not path.is_file():
        raise UserError(f"no submission at {path}: expected a .py file with a function custom_kernel(data)")
    if str(PROJECT_ROOT) not in sys.path:
        sys.path.insert(0, str(PROJECT_ROOT))
    try:
        module = execute(path, "submission")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be loaded: {describe_error(error, path)}") from error
    if not callable(getattr(module, "custom_kernel", None)):
        raise UserError(f"{path} has no function custom_kernel(data): add it, the leaderboard calls nothing else")
    if path == PROJECT_SUBMISSION:
        sm_90.install()
    return Submission(path, module)


class Submission:
    """A loaded file."""

    def __init__(self, path: Path, module: ModuleType):
        self.path = path
        self._kernel: Callable = module.custom_kernel
        self._options = _keywords(self._kernel)
        tables = getattr(module, "TABLES", None)
        self._tables = tables if isinstance(tables, dict) else {}
        explain = getattr(module, "explain", None)
        self._explain: Callable | None = explain if _keywords(explain) >= {"table", "device"} else None

    def check_table(self, name: str) -> None:
        """Raises UserError unless plans of that table can be run."""
        if not self._tables or self._explain is None or "plan" not in self._options:
            raise UserError(
                f"{self.path} has no tables to choose from: it needs TABLES, explain and custom_kernel(…, plan=)"
            )
        if name not in self._tables:
            raise unknown("table", name, map(str, self._tables))

    def explain(self, batch_size: int, kv_seq_len: int, table: str | None, device: Any) -> Any:
        """What the submission's explain says of a shape; None without one. Raises UserError if it fails."""
        if self._explain is None:
            return None
        try:
            explanation = self._explain(batch_size, kv_seq_len, table=table, device=device)
            explanation.plan  # noqa: B018 (all that is asked of an explanation)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"explain({batch_size}, {kv_seq_len}) of {self.path} failed: {describe_error(error, self.path)}"
            ) from error
        return explanation

    def plan_info(self, batch_size: int, kv_seq_len: int, table: str | None, device: Any) -> PlanInfo | None:
        """What is shown of a shape's plan; None if the submission says nothing. Raises as explain does."""
        explanation = self.explain(batch_size, kv_seq_len, table, device)
        if explanation is None:
            return None
        plan, precision = explanation.plan, getattr(explanation, "precision", None)
        return PlanInfo(plan_text(plan), getattr(plan, "page_size", 1), precision if precision in PRECISIONS else None)

    def kernel(self, args: dict, table: str | None, device: Any, *, strict: bool) -> Callable:
        """custom_kernel for a case: as the server calls it or, with `table` or `strict`, with those options bound."""
        options: dict[str, Any] = {"strict": True} if strict and "strict" in self._options else {}
        if table is not None:
            plan = self._explain(args["batchsize"], args["kvseqlen"], table=table, device=device).plan
            options["plan"] = plan
            if getattr(plan, "page_size", 1) > 1 and "kernels_honour_page_size" in self._options:
                options["kernels_honour_page_size"] = True
        return functools.partial(self._kernel, **options) if options else self._kernel


def _keywords(function: Any) -> set[str]:
    """The parameters that can be given by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
