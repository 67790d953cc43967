"""exact: the answer is attention over the whole cache, for every head, and without an error that all outputs share."""

import torch

from bench.checks.scope import HEAD, Outcome, Scope
from bench.worker.subject import Shape, Subject, count, label
from reference import NUM_HEADS, PRECISIONS, ExactVerdict, exact_attention, relative_l2
from task import input_t, output_t

SHARED = 0.005  # relative error that all outputs of a kernel may share


def exact(subject: Subject, scope: Scope) -> Outcome:
    outcome, worst, formats = Outcome(), 0.0, set()
    for i, shape in enumerate(scope.shapes):
        data, output, verdict = _judged(subject, shape, scope.seed + i)
        worst = max(worst, verdict.kernel_error)
        if verdict.ok:
            formats.add(verdict.precision)
            truth = exact_attention(data, verdict.precision)
            faults = _heads_off(output, truth, verdict.precision)
            if shape in scope.small:
                faults += _biases(data, output, truth, verdict.precision)
            outcome.findings += [f"{label(shape)}: {fault}" for fault in faults]
        else:
            outcome.findings.append(f"{label(shape)}: {verdict.message}")
        del data
    read = f", reads as {', '.join(sorted(formats))}" if formats else ""
    outcome.note = f"{count(scope.shapes)}, worst gate A {worst:.4f}{read}"
    return outcome


def _judged(subject: Subject, shape: Shape, seed: int) -> tuple[input_t, output_t, ExactVerdict]:
    """Fresh data, an output and what both gates say of it.

    Rounding the cache to fp8 can by itself move a sequence past gate B's budget (0.050 was seen, once in thousands):
    where gate A holds and gate B does not, another draw decides.
    """
    for draw in range(2):
        data = subject.draw(shape, seed + 1000 * draw)
        output = subject.call(data)
        verdict = subject.judge(data, output)
        if verdict.ok or not subject.judge(data, output, standard_normal=False).ok:
            break
    return data, output, verdict


def _heads_off(output: output_t, truth: torch.Tensor, precision: str) -> list[str]:
    """Heads that lack what their sequence as a whole can lose within gate A."""
    budget = HEAD * PRECISIONS[precision].kernel_budget
    errors = relative_l2(output.flatten(0, 1), truth.flatten(0, 1)).view(-1, NUM_HEADS)
    off = (errors > budget).nonzero().tolist()
    return [f"head {h} of sequence {b} is off by {errors[b, h]:.3g}, a head may be by {budget}" for b, h in off[:3]]


def _biases(data: input_t, output: output_t, truth: torch.Tensor, precision: str) -> list[str]:
    """Errors that all outputs share, too small for gate A on each: a factor, and a softmax scale that is off.

    Rounding has no such direction: over thousands of outputs its share in one is far below SHARED.
    """
    *rest, config = data
    hotter = exact_attention((*rest, config | {"sm_scale": config["sm_scale"] * (1 + SHARED)}), precision)
    error = (output.float() - truth).flatten().double()
    factor = (error @ truth.flatten().double() / truth.double().square().sum()).item()
    slope = (hotter - truth).flatten().double()
    scale = SHARED * (error @ slope / slope.square().sum().clamp(min=1e-300)).item()
    found = {"outputs are": factor, "the softmax scale is": scale}
    return [f"{what} {1 + value:.4f} times what they should be" for what, value in found.items() if abs(value) > SHARED]
