"""mla cost: that its parts are the call's own and the kernels are put back. No test asserts a time."""

import pytest
import torch
from typer.testing import CliRunner

import submission
from bench.cli import app
from bench.commands import cost
from tests.conftest import HOPPER

import aiter  # isort: skip


def test_every_runner_is_measured_and_the_kernels_put_back(monkeypatch):
    monkeypatch.setattr(cost, "_CALLS", 5)
    monkeypatch.setattr(cost, "_ROUNDS", 3)
    kernels = aiter.mla.mla_decode_fwd, cost.KernelInterface and cost.KernelInterface.__getitem__
    costs = {item.runner: item for item in cost.measure()}
    plans = cost.PLANS | ({"wgmma": submission.plan_for(*cost.SHAPE, table="sm_90")} if HOPPER else {})
    assert set(costs) == set(plans)
    can_run = {name for name in submission.RUNNERS if name != "wgmma" or HOPPER} - {"fused" * (not submission.triton)}
    assert {plan.runner for plan in plans.values()} == can_run
    assert (aiter.mla.mla_decode_fwd, cost.KernelInterface and cost.KernelInterface.__getitem__) == kernels
    for name, item in costs.items():
        plan = plans[name]
        assert item.whole > item.bare > 0
        assert ("q cast" in item.parts) == (plan.precision == "a8w8")
        assert ("launches" in item.parts) == (plan.runner in ("fused", "wgmma"))
        assert item.on_top == item.whole - item.bare
        assert abs(sum(item.parts.values()) + item.other - item.on_top) < 1e-9


@pytest.mark.parametrize("name", cost.PLANS)
def test_the_bare_calls_are_those_of_the_plan(name):
    plan = cost.PLANS[name]
    data = cost.generate_input(cost.SHAPE[0], 1, cost.SHAPE[1], 0, device="cpu")
    with cost._nothing_behind(torch.device("cpu")) as launched:
        cost.custom_kernel(data, plan=plan)
    runner = submission.RUNNERS[plan.runner]
    on_aiter = isinstance(runner, submission.AiterRunner)
    assert list(launched) == (["decode"] if on_aiter else list(runner.kernels(plan)))


def test_the_command_prints_a_line_a_runner(monkeypatch):
    monkeypatch.setattr(cost, "_CALLS", 5)
    monkeypatch.setattr(cost, "_ROUNDS", 3)
    result = CliRunner().invoke(app, ["cost"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in cost.PLANS)
    assert "input checks" in result.output
