"""sm_90.install: what it adds, and to which module; with and without a Triton that has Gluon; the upload without it."""

import subprocess
import sys

import pytest

import sm_90
import submission
from bench.basics import PROJECT_ROOT, PROJECT_SUBMISSION
from bench.modules import execute
from bench.worker.loading import load

TABLES = {"sm_90", "sm_90_bf16", "sm_90_mxfp4", "sm_90_plain"}


def run(code: str) -> str:
    """In a process that has not imported the submission yet; its last line."""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_the_upload_alone_knows_nothing_of_it():
    alone = execute(PROJECT_SUBMISSION, "submission")
    assert set(alone.TABLES) == {"gfx950", "gfx950_fused", "gfx950_fused_mxfp4", "v50"}
    assert "wgmma" not in alone.RUNNERS
    assert alone.TABLE_OF_ARCH == {"gfx950": "gfx950"}
    text = PROJECT_SUBMISSION.read_text().lower()
    assert not [word for word in ("sm_90", "wgmma", "gluon", "hopper", "h100", "h200") if word in text]


def test_the_upload_runs_where_it_is_missing():
    assert run("import sys; sys.modules['sm_90'] = None; import submission; print(*submission.RUNNERS)") == (
        "bf16 fp8_nonpersistent a16w8_persistent a8w8_persistent fused"
    )


def test_it_installs_into_the_module_that_is_there_now():
    """The tools run the submission's file again under the same name: plans are of that module's class."""
    alone = execute(PROJECT_SUBMISSION, "submission")
    sm_90.install()
    sm_90.install()
    assert set(alone.TABLES) - {"gfx950", "gfx950_fused", "gfx950_fused_mxfp4", "v50"} == TABLES
    assert {type(plan) for name in TABLES for plan in alone.TABLES[name].values()} == {alone.Plan}
    assert isinstance(alone.RUNNERS["wgmma"], alone.FusedRunner)
    assert alone.explain(64, 8192, table="sm_90").kernels == ("_wgmma_kernel", "_merge_kernel")
    with pytest.raises(alone.InputError, match=r"must be one of \(64,\) for wgmma"):
        alone.check_plan(alone.Plan("wgmma", 1, tile=alone.Tile("fp8", block=32, merge="kernel")), 64)


def test_the_tools_install_it_for_the_projects_own_file_alone(tmp_path):
    other = tmp_path / "submission.py"
    other.write_text(PROJECT_SUBMISSION.read_text())
    load(other)
    assert "sm_90" not in sys.modules["submission"].TABLES
    load(PROJECT_SUBMISSION)
    assert set(sys.modules["submission"].TABLES) > TABLES


@pytest.mark.parametrize(
    "hidden", ["triton", "triton.experimental", "triton.experimental.gluon.language.nvidia.hopper"]
)
def test_where_triton_cannot_compile_it_the_gpu_gets_the_plain_table(hidden):
    code = f"import sys; sys.modules['{hidden}'] = None; import submission, sm_90, torch; sm_90.install(); "
    code += "print(submission.TABLE_OF_ARCH['sm_90'], submission.plan_for(64, 8192, table='sm_90').runner, "
    code += "sm_90.can_run(torch.device('cpu')))"
    assert run(code) == "sm_90_plain wgmma False"


@pytest.mark.parametrize("table", sorted(TABLES))
def test_its_tables_have_every_benchmark_shape(table):
    assert set(submission.TABLES[table]) == set(submission.GFX950_TABLE)
