"""`mla roofline`: the times that `mla compare --csv` wrote, as a picture."""

from pathlib import Path

from bench.basics import UserError
from bench.contest.measurements import read_csv
from bench.show.files import check_target, write_bytes
from bench.show.picture import FORMATS, roofline


def run(results: Path, picture: Path) -> None:
    """Draw the picture of a results file. Raises UserError for another file, or a picture that cannot be written."""
    if picture.suffix not in FORMATS:
        raise UserError(f"--out {picture}: expected a name that ends in {', '.join(FORMATS)}")
    check_target(picture, "--out")
    write_bytes(picture, roofline(read_csv(results), picture.suffix), "--out")
