"""mla roofline: what it reads, draws and refuses."""

import pytest
from typer.testing import CliRunner

from bench.basics import PROJECT_ROOT
from bench.cli import app

pytest.importorskip("matplotlib", reason="needs the plots extra: pip install -e '.[plots]'")

RESULTS = PROJECT_ROOT / "results" / "h200_fused.csv"
HEADER = "batch_size,kv_seq_len,kind,contestant,cache,median_us,gpu\n"


def mla(*arguments: object):
    return CliRunner(env={"COLUMNS": "150"}).invoke(app, ["roofline", *map(str, arguments)])


def test_our_results_are_drawn(tmp_path):
    result = mla(RESULTS, "--out", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_fastest_of_a_shape_and_line_counts(tmp_path):
    from bench.contest.measurements import read_csv

    rows = [
        "256,8192,ours,table a,mxfp4,1027.2,X",
        "256,8192,ours,table b,mxfp4,900,X",
        "256,8192,ours,table a,fp8,800,X",
        "256,8192,peer,theirs,fp8,700,X",
    ]
    (tmp_path / "in.csv").write_text(HEADER + "\n".join(rows))
    read = read_csv(tmp_path / "in.csv")
    assert read.gpu == "X"
    assert read.rate is read.launch is None
    lines = {"ours, mxfp4 cache": 900e-6, "ours, fp8 cache": 800e-6, "theirs": 700e-6}
    assert {p.line: p.seconds for p in read.points} == pytest.approx(lines)
    assert len(read.points) == 3
    assert read.points[0].bytes == 256 * (8192 * 306 + 16 * (576 + 512) * 2)


def test_rows_with_a_fault_are_left_out(tmp_path):
    from bench.contest.measurements import read_csv

    header = HEADER.strip() + ",fault,launch_us,bytes_per_second\n"
    rows = [
        "4,1024,ours,t,fp8,,X,no luck,3.1,4e12",
        "4,1024,peer,p,fp8,9,X,gate B,3.1,4e12",
        "4,8192,ours,t,fp8,9,X,,3.1,4e12",
    ]
    (tmp_path / "in.csv").write_text(header + "\n".join(rows))
    read = read_csv(tmp_path / "in.csv")
    assert [(p.kv_seq_len, p.line) for p in read.points] == [(8192, "ours, fp8 cache")]
    assert (read.rate, read.launch) == (4e12, pytest.approx(3.1e-6))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is no results file"),
        (HEADER.strip() + ",fault\n4,1024,ours,t,fp8,,X,no luck\n", "every row has a fault"),
        (HEADER + "4,1024,ours,t,fp8,inf,X\n", "is no measurement"),
        ("a,b\n1,2\n", "is no results file"),
        (HEADER + "4,1024,ours,t,fp8,fast,X\n", "line 2: could not convert"),
        (HEADER + "4,1024,ours,t,fp4,1.0,X\n", "is no measurement"),
        (HEADER + "4,1024,ours,t,fp8,0,X\n", "is no measurement"),
        (HEADER + "4,1024,ours,t,fp8,1,X\n4,1024,ours,t,fp8,1,Y\n", "holds several GPUs (X, Y)"),
    ],
)
def test_other_files_are_refused(tmp_path, content, says):
    (tmp_path / "in.csv").write_text(content)
    result = mla(tmp_path / "in.csv", "--out", tmp_path / "out.png")
    assert result.exit_code == 2
    assert says in result.output
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(("name", "says"), [("out.txt", "ends in .png"), ("nowhere/out.png", "create it first")])
def test_pictures_that_cannot_be_written_are_refused(tmp_path, name, says):
    result = mla(RESULTS, "--out", tmp_path / name)
    assert result.exit_code == 2
    assert says in result.output


def test_a_gpu_that_is_not_known_has_no_roof(tmp_path):
    (tmp_path / "in.csv").write_text(HEADER + "4,1024,ours,t,fp8,1.0,Unknown\n")
    assert mla(tmp_path / "in.csv", "--out", tmp_path / "out.svg").exit_code == 0
