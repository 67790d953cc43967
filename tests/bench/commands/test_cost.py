"""mla cost: that its parts are the call's own and the kernels are put back. No test asserts a time."""

import pytest
from typer.testing import CliRunner

import submission
from bench.cli import app
from bench.commands import cost

import aiter  # isort: skip


def test_every_runner_is_measured_and_the_kernels_put_back(monkeypatch):
    monkeypatch.setattr(cost, "_CALLS", 5)
    monkeypatch.setattr(cost, "_ROUNDS", 3)
    kernels = aiter.mla.mla_decode_fwd, submission._fused_kernel, submission._merge_kernel
    costs = {item.runner: item for item in cost.measure()}
    measured = {cost.PLANS.get(name, cost.SM90_TABLE[cost.SHAPE]).runner for name in costs}
    assert measured == {name for name, r in submission.RUNNERS.items() if r.on_aiter or submission.triton}
    assert (aiter.mla.mla_decode_fwd, submission._fused_kernel, submission._merge_kernel) == kernels
    for name, item in costs.items():
        plan = cost.PLANS.get(name, cost.SM90_TABLE[cost.SHAPE])
        assert item.whole > item.bare > 0
        assert ("q cast" in item.parts) == (plan.precision == "a8w8")
        assert ("launches" in item.parts) == (plan.runner == "fused")
        assert item.on_top == item.whole - item.bare
        assert abs(sum(item.parts.values()) + item.other - item.on_top) < 1e-9


@pytest.mark.parametrize("name", cost.PLANS)
def test_the_bare_calls_are_those_of_the_plan(name):
    plan = cost.PLANS[name]
    data = cost.generate_input(cost.SHAPE[0], 1, cost.SHAPE[1], 0, device="cpu")
    with cost._nothing_behind() as launched:
        cost.custom_kernel(data, plan=plan)
    on_aiter = submission.RUNNERS[plan.runner].on_aiter
    assert list(launched) == (["decode"] if on_aiter else list(submission.RUNNERS["fused"].kernels(plan)))


def test_the_command_prints_a_line_a_runner(monkeypatch):
    monkeypatch.setattr(cost, "_CALLS", 5)
    monkeypatch.setattr(cost, "_ROUNDS", 3)
    result = CliRunner().invoke(app, ["cost"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in cost.PLANS)
    assert "input checks" in result.output
