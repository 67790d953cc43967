"""mla cost: that its parts are the call's own, and that nothing stays in aiter's place. No test asserts a time."""

from typer.testing import CliRunner

import submission
from bench import cost
from bench.cli import app

import aiter  # isort: skip


def test_every_runner_is_measured_and_aiter_put_back(monkeypatch):
    monkeypatch.setattr(cost, "_CALLS", 5)
    monkeypatch.setattr(cost, "_ROUNDS", 3)
    original = aiter.mla.mla_decode_fwd
    costs = {item.runner: item for item in cost.measure()}
    assert set(costs) == {name for name, runner in submission.RUNNERS.items() if runner.on_aiter}
    assert aiter.mla.mla_decode_fwd is original
    for name, item in costs.items():
        assert item.whole > item.bare > 0
        assert ("q cast" in item.parts) == (submission.RUNNERS[name].precision == "a8w8")
        assert item.on_top == item.whole - item.bare
        assert abs(sum(item.parts.values()) + item.other - item.on_top) < 1e-9


def test_the_command_prints_a_line_a_runner(monkeypatch):
    monkeypatch.setattr(cost, "_CALLS", 5)
    monkeypatch.setattr(cost, "_ROUNDS", 3)
    result = CliRunner().invoke(app, ["cost"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in cost.PLANS)
    assert "input checks" in result.output
