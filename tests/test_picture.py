"""mla roofline: what it reads, draws and refuses."""

import pytest
from typer.testing import CliRunner

from bench.basics import PROJECT_ROOT
from bench.cli import app

pytest.importorskip("matplotlib", reason="needs the plots extra: pip install -e '.[plots]'")

RESULTS = PROJECT_ROOT / "results" / "h200_fused.csv"
HEADER = "batch_size,kv_seq_len,table,cache,median_us,gpu\n"


def mla(*arguments: object):
    return CliRunner(env={"COLUMNS": "150"}).invoke(app, ["roofline", *map(str, arguments)])


def test_our_results_are_drawn(tmp_path):
    result = mla(RESULTS, "--out", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_fastest_of_a_shape_counts():
    from bench.picture import read_points

    gpu, points = read_points(RESULTS)
    assert gpu == "NVIDIA H200"
    assert len({(p.batch_size, p.kv_seq_len, p.cache) for p in points}) == len(points) == 24
    largest = next(p for p in points if (p.batch_size, p.kv_seq_len, p.cache) == (256, 8192, "mxfp4"))
    assert largest.seconds == pytest.approx(1027.2e-6)
    assert largest.bytes == 256 * (8192 * 306 + 16 * (576 + 512) * 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is no results file"),
        ("a,b\n1,2\n", "is no results file"),
        (HEADER + "4,1024,t,fp8,fast,X\n", "line 2: could not convert"),
        (HEADER + "4,1024,t,fp4,1.0,X\n", "is no measurement"),
        (HEADER + "4,1024,t,fp8,0,X\n", "is no measurement"),
        (HEADER + "4,1024,t,fp8,1,X\n4,1024,t,fp8,1,Y\n", "holds several GPUs (X, Y)"),
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
    (tmp_path / "in.csv").write_text(HEADER + "4,1024,t,fp8,1.0,Unknown\n")
    assert mla(tmp_path / "in.csv", "--out", tmp_path / "out.svg").exit_code == 0
