"""inputs: the caller's tensors and config are as they were after the call."""

from bench.checks.scope import Outcome, Scope
from bench.worker.subject import Subject, count


def inputs_untouched(subject: Subject, scope: Scope) -> Outcome:
    """What is watched in every call of every check, larger shapes included."""
    for shape in scope.small:
        subject.call(subject.draw(shape, scope.seed))
    return Outcome(note=f"every tensor and the config, in {count(scope.small)}")
