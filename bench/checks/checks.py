"""The list of the checks of `mla verify`: what each is called, and what its failing means for a kernel.

A check takes a Subject (the submission on a device) and a Scope (how much to try) and returns an Outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.checks.deterministic import deterministic
from bench.checks.exact import exact
from bench.checks.fresh import after_another_device, fresh_work
from bench.checks.hard import hard_numbers
from bench.checks.inputs import inputs_untouched
from bench.checks.scope import Outcome, Scope
from bench.checks.strays import no_stray_reads
from bench.checks.tokens import every_token
from bench.checks.upload import upload_rules
from bench.worker.subject import Subject, SubmissionFaultError


@dataclass(frozen=True)
class Check:
    """A check, what it is called, and what its failing means. apart: a part of it for a process of its own; calls:
    whether it calls the submission at all."""

    title: str
    means: str
    function: Callable[[Subject, Scope], Outcome]
    apart: Callable[[Subject, Scope], Outcome] | None = None
    calls: bool = True


CHECKS: dict[str, Check] = {
    "exact": Check(
        "exact", "the answer is not attention over the whole cache, whatever the official check says", exact
    ),
    "tokens": Check("every token counts", "some tokens are never read, or others in their place", every_token),
    "strays": Check(
        "no stray reads", "rows that belong to nobody, or to other sequences, get into the answer", no_stray_reads
    ),
    "fresh": Check(
        "fresh work",
        "an output, a pointer or metadata of an earlier call is used again",
        fresh_work,
        after_another_device,
    ),
    "hard": Check("hard numbers", "overflow, underflow or a missing maximum, which real data will meet", hard_numbers),
    "deterministic": Check("deterministic", "a race, or memory that nobody wrote", deterministic),
    "inputs": Check("inputs untouched", "the caller's tensors are written to: its next call differs", inputs_untouched),
    "upload": Check(
        "rules of the upload", "the server will refuse the file, or fail to load it", upload_rules, calls=False
    ),
}


def run_check(name: str, subject: Subject, scope: Scope, *, apart: bool = False) -> Outcome:
    """Carry out one check, or the part of it that is for a process of its own; what the submission raises is a
    finding."""
    check = CHECKS[name]
    try:
        return (check.apart if apart else check.function)(subject, scope)
    except SubmissionFaultError as fault:
        return Outcome([str(fault)], "stopped at the first fault")
