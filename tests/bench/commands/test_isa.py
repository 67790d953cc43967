"""`mla isa run`: what it prints, writes and returns, how it refuses; and the example of docs/gfx950.md."""

import json
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bench.cli import app

gfx950 = pytest.importorskip("gfx950", reason="needs the gfx950 extra: pip install -e '.[gfx950]'")
pytest.importorskip("triton", reason="needs the gfx950 extra: pip install -e '.[gfx950]'")

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n)
    tl.store(y_ptr + at, x * factor, at < n)

@triton.jit
def defaults(x_ptr, n=10, factor=2.0, other_ptr=None, BLOCK: tl.constexpr = 16):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * factor, at < n)

@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def tuned(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)

@triton.jit
def prints(x_ptr, BLOCK: tl.constexpr):
    tl.device_print("x", tl.load(x_ptr + tl.arange(0, BLOCK)))

def plain(x_ptr):
    pass

@triton.jit
def broken(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), undefined_name)
"""
SCALE = ("--grid", "4", "--arg", "randn:float32:1000", "--arg", "empty:float32:1000", "--arg", "1000", "--arg", "0.5")
COMPILED = (*SCALE, "--constexpr", "BLOCK=256")


def mla(*arguments: object):
    return CliRunner(env={"COLUMNS": "150"}).invoke(app, ["isa", "run", *map(str, arguments)])


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "my_kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def scale(kernels):
    from bench.commands.isa import _triton_kernel

    return _triton_kernel(kernels, "scale")


def test_the_example_of_the_docs(scale):
    x, y = torch.randn(1000), gfx950.Uninitialised(torch.empty(1000))
    result = gfx950.run(scale, (4,), (x, y, 1000, 0.5), constexprs={"BLOCK": 256}, num_warps=4)
    assert result.ok, "\n".join(map(str, result.findings))
    assert torch.equal(y.tensor, x * 0.5)


def test_a_clean_kernel_passes(kernels, tmp_path):
    result = mla(f"{kernels}:scale", *COMPILED, "--num-warps", 4, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith("isa: pass")
    for shown in ("grid       4, 4 waves a workgroup", "x_ptr", "vector", "not measured"):
        assert shown in result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ok"]
    assert written["counters"]["waves"] == 16
    x, y = written["counters"]["buffers"]
    assert (x["name"], x["bytes_read"], x["distinct_bytes_read"]) == ("x_ptr", 4000, 4000)
    assert (y["name"], y["bytes_written"], y["distinct_bytes_written"]) == ("y_ptr", 4000, 4000)


def test_a_finding_fails(kernels, tmp_path):
    arguments = [a if a != "1000" else "1001" for a in COMPILED]
    result = mla(f"{kernels}:scale", *arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert result.output.rstrip().endswith("isa: fail")
    assert "out-of-bounds: reads 4 bytes at byte 4000 of x_ptr, which has 4000" in result.output
    assert "my_kernels.py:8" in result.output
    assert {f["kind"] for f in json.loads((tmp_path / "out.json").read_text())["findings"]} == {"out-of-bounds"}


def test_an_elf_runs_too(scale, tmp_path):
    args = (torch.empty(1000), torch.empty(1000), 1000, 0.5)
    (tmp_path / "scale.hsaco").write_bytes(gfx950.compile(scale, args, {"BLOCK": 256}, num_warps=2).elf)
    assert mla(tmp_path / "scale.hsaco", *SCALE).exit_code == 0
    assert mla(f"{tmp_path / 'scale.hsaco'}:scale", *SCALE, "--order", "shuffled").exit_code == 0
    refused = mla(f"{tmp_path / 'scale.hsaco'}:other", *SCALE)
    assert refused.exit_code == 2
    assert "no kernel 'other', only ['scale']" in refused.output


def test_arguments_come_from_files(kernels, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(1000, dtype=np.float32))
    torch.save(torch.zeros(1000), tmp_path / "y.pt")
    arguments = ["--arg", tmp_path / "x.npy", "--arg", tmp_path / "y.pt", "--arg", "1000", "--arg", "2.0"]
    assert mla(f"{kernels}:scale", "--grid", 4, *arguments, "--constexpr", "BLOCK=256").exit_code == 0


@pytest.mark.parametrize(
    ("kernel", "arguments", "says"),
    [
        ("nowhere.py:scale", COMPILED, "no such file"),
        ("{}:other", COMPILED, "with one of: broken, defaults, prints, scale"),
        ("{}", COMPILED, "with one of: broken, defaults, prints, scale"),
        ("{}:plain", ("--arg", "1"), "plain is a function; expected a @triton.jit function"),
        ("{}:tuned", ("--arg", "zeros:float32:64"), "tuned is wrapped in Triton's Autotuner"),
        ("{}:prints", ("--arg", "zeros:float32:64", "--constexpr", "BLOCK=64"), "prints calls the host"),
        ("{}:scale", (*SCALE[:-1], "1e300", "--constexpr", "BLOCK=256"), "factor = 1e+300 does not fit"),
        ("{}:scale", (*COMPILED, "--num-warps", "3"), "num_warps is 3; expected a power of two"),
        ("{}:scale", (*COMPILED, "--grid", "99999999999"), "expected one to three positive integers"),
        ("{}:scale", (*COMPILED, "--seed", "-1"), "Invalid value for '--seed'"),
        ("{}:scale", (*COMPILED, "--arg", "randn:float32:10000000000000"), "cannot be made"),
        ("{}:scale", (*COMPILED, "--arg", "randn:float32:99999999999999999999999"), "cannot be made"),
        ("{}:scale", (*COMPILED, "--arg", "randn:float4_e2m1fn_x2:16"), "cannot be made"),
        ("{}:scale", (*SCALE[:-1], "1" * 400, "--constexpr", "BLOCK=256"), "does not fit in 64 bits"),
        ("{}:scale", (*COMPILED, "--grid", "0"), "one to three positive numbers"),
        ("{}:scale", (*COMPILED, "--grid", "1,2,3,4"), "one to three positive numbers"),
        ("{}:scale", SCALE, "needs a value for BLOCK"),
        ("{}:scale", (*COMPILED, "--arg", "7"), "takes 4 arguments (x_ptr, y_ptr, n, factor), got 5"),
        ("{}:scale", (*COMPILED, "--constexpr", "WIDTH=4"), "no parameter WIDTH"),
        ("{}:scale", (*COMPILED, "--constexpr", "BLOCK"), "expected NAME=VALUE"),
        ("{}:scale", (*COMPILED, "--arg", "randn:float33:4"), "torch has no type float33"),
        ("{}:scale", (*COMPILED, "--arg", "rand:float32:4"), "expected a number, True, False or None; randn"),
        ("{}:scale", (*COMPILED, "--arg", "nowhere.npy"), "no such file"),
        ("{}:scale", (*COMPILED, "--order", "sorted"), "expected one of shuffled, reversed, lockstep"),
        ("{}:scale", (*COMPILED, "--lds", "64"), "--lds is for ELF files"),
        ("{}:scale", (*COMPILED, "--json", "nowhere/out.json"), "create it first"),
        ("{}:broken", ("--arg", "zeros:float32:16", "--constexpr", "BLOCK=16"), "undefined_name"),
    ],
)
def test_wrong_usage_is_refused(kernels, kernel, arguments, says):
    result = mla(kernel.format(kernels), *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("words", [(), ("10", "2.0", "None"), ("10", "2")])
def test_defaults_of_a_kernel(kernels, tmp_path, words):
    arguments = [part for word in words for part in ("--arg", word)]
    result = mla(f"{kernels}:defaults", "--arg", "ones:float32:16", *arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    (x,) = json.loads((tmp_path / "out.json").read_text())["counters"]["buffers"]
    assert (x["distinct_bytes_read"], x["distinct_bytes_written"]) == (40, 40)


@pytest.mark.parametrize("command", [["run", "{}:scale"], ["plan", "64", "8192"]], ids=["run", "plan"])
def test_without_triton_the_error_says_so(kernels, monkeypatch, command):
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner(env={"COLUMNS": "150"}).invoke(app, ["isa", *(part.format(kernels) for part in command)])
    assert result.exit_code == 2, result.output
    assert "needs Triton to be compiled" in result.output


@pytest.mark.parametrize(("table", "bytes_a_token"), [("gfx950_fused", "576.0"), ("gfx950_fused_mxfp4", "306.0")])
def test_a_plan_is_reported(table, bytes_a_token):
    result = CliRunner(env={"COLUMNS": "150"}).invoke(app, ["isa", "plan", "64", "8192", "--table", table])
    assert result.exit_code == 0, result.output
    assert f"bytes read from the cache {bytes_a_token}" in " ".join(result.output.split())
    assert "v_mfma_f32_16x16x32_bf16" in result.output
    assert "0 spilled" in result.output
    assert "computed from an MI355X's published rates, not measured: memory" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["64", "8192", "--table", "gfx950"], "is a8w8_persistent, and not our kernel for gfx950"),
        (["64", "8192", "--table", "sm_90"], "is wgmma, and not our kernel for gfx950"),
        (["64", "8192", "--table", "gfx951"], "unknown table 'gfx951'"),
        (["0", "8192"], "must be 1 or more"),
    ],
)
def test_a_plan_that_cannot_be_reported(arguments, says):
    result = CliRunner(env={"COLUMNS": "150"}).invoke(app, ["isa", "plan", *arguments])
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(("length", "says"), [(0, "not an ELF file"), (40, "ELF"), (3000, "damaged or cut short")])
def test_a_file_that_is_no_code_object_is_refused(scale, tmp_path, length, says):
    args = (torch.empty(1000), torch.empty(1000), 1000, 0.5)
    path = tmp_path / "kernel.hsaco"
    path.write_bytes(gfx950.compile(scale, args, {"BLOCK": 256}, num_warps=2).elf[:length] or b"not an ELF")
    result = mla(path)
    assert result.exit_code == 2
    assert says in result.output
