"""The baseline kernel that `mla compare` times beside ours, and the sanitizer run: on a GPU, and on the CPU under
Triton's interpreter, in a process of its own.
"""

import pytest
import torch
from typer.testing import CliRunner

from bench.cli import app
from tests.conftest import interpreted, not_interpreted, on_gpu, run_interpreted
from tests.oracle import attention, error, numpy_of
from tests.ragged import RAGGED, SM_SCALE, Ragged

triton = pytest.importorskip("triton", reason="needs Triton: pip install -e '.[gfx950]'")


@not_interpreted
def test_the_rest_of_this_file():
    run_interpreted(__file__)


def errors(lengths: list[int], splits: int, device: str) -> list[float]:
    """Relative L2 of each sequence to the float64 oracle; of an empty one, its largest element."""
    from bench.contest.baseline import decode

    case = Ragged(lengths, "bf16", seed=splits)
    tensors = (t.to(device) for t in (case.q, case.cache, case.indptr))
    output = decode(*tensors, SM_SCALE, splits)
    kv, found = case.held, []
    for i, length in enumerate(lengths):
        rows = kv[case.indptr[i] : case.indptr[i + 1]]
        exact = attention(numpy_of(case.q[i]), rows, SM_SCALE) if length else None
        found.append(error(output[i], exact) if length else output[i].abs().max().item())
    return found


@interpreted
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_plain_interpreted(splits):
    """What is left is the output's rounding, which the interpreter does by cutting off."""
    found = errors([*RAGGED, 130], splits, "cpu")
    assert max(found) < 0.005
    assert found[RAGGED.index(0)] == 0


@on_gpu
@pytest.mark.parametrize("splits", [1, 3, 8, 60])
def test_plain_on_a_gpu(splits):
    found = errors([*RAGGED, 130, 2000], splits, "cuda")
    assert max(found) < 0.004
    assert found[RAGGED.index(0)] == 0


def test_plain_splits_fill_the_machine_once():
    from bench.contest.baseline import splits_for

    assert [splits_for(*shape, 132) for shape in ((4, 1024), (4, 8192), (32, 8192), (256, 8192))] == [16, 33, 4, 1]


@interpreted
def test_sanitize_judges_every_plan(monkeypatch, capsys):
    """Few plans here, for time: both are ok, and the one whose output is then changed by 1 % is not."""
    from bench.commands import sanitize
    from submission import Plan, Tile

    few = [Plan("fused", num_splits=splits, tile=Tile("bf16", block=16, merge="kernel")) for splits in (1, 2)]
    monkeypatch.setattr(sanitize, "LENGTHS", (17, 0))
    monkeypatch.setattr(sanitize, "plans", lambda tables: iter(few))
    run, outputs = sanitize.run, {}
    outputs.update((plan, run(plan, sanitize.draw(), torch.device("cpu"), "interpreter")) for plan in few)
    monkeypatch.setattr(sanitize, "run", lambda plan, *_: outputs[plan])
    assert sanitize.check(torch.device("cpu"), "interpreter", ()) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "ok", "all"]
    outputs[few[1]] = outputs[few[1]] * 1.01
    assert sanitize.check(torch.device("cpu"), "interpreter", ()) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "WRONG", "1"]


@interpreted
@pytest.mark.parametrize("fault", ["unwritten", "tickets"])
def test_sanitize_sees_what_a_kernel_leaves_behind(monkeypatch, fault):
    from bench.commands import sanitize
    from submission import FusedRunner, Launch, Plan, Problem, Tile

    class Kernel:
        def __getitem__(self, grid):
            return self.run

        def run(self, tickets_ptr, output):
            if fault == "tickets":
                tickets_ptr.fill_(1)
                output.zero_()

    def launches(runner, problem: Problem, plan: Plan, output: torch.Tensor, target: str) -> list[Launch]:
        tickets = torch.zeros(problem.batch_size, dtype=torch.int32)
        return [Launch(Kernel(), (1,), {"tickets_ptr": tickets, "output": output}, {}, {})]

    monkeypatch.setattr(FusedRunner, "launches", launches)
    plan = Plan("fused", num_splits=1, tile=Tile("bf16"))
    assert sanitize.run(plan, sanitize.draw(), torch.device("cpu"), "interpreter").isnan().all()


def test_sanitize_runs_every_format_split_and_merge():
    from bench.commands.sanitize import plans
    from submission import TABLES

    found = list(plans(("sm_90", "sm_90_mxfp4")))
    assert len(found) == len(set(found))
    for cache in ("bf16", "fp8", "mxfp4"):
        mine = {(p.num_splits, p.tile.merge) for p in found if p.tile.cache == cache and p.runner == "fused"}
        assert mine == {(1, "last"), (3, "last"), (8, "last"), (3, "kernel"), (8, "kernel")}
    wgmma = [(p.tile.cache, p.num_splits, p.tile.merge) for p in found if p.runner == "wgmma"]
    assert sorted(wgmma) == [(cache, splits, "kernel") for cache in ("fp8", "mxfp4") for splits in (1, 3, 8)]
    assert {p.tile for p in TABLES["sm_90"].values()} <= {p.tile for p in found}


@on_gpu
def test_sanitize_on_a_gpu(capsys):
    from bench.commands import sanitize

    assert sanitize.main() == 0
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_sanitize_without_a_gpu():
    result = CliRunner().invoke(app, ["sanitize"])
    assert result.exit_code == 2
    assert "needs a GPU" in result.stderr
