"""A persistent call does what its lists say, and refuses lists that cannot be its own."""

import pytest
import torch

from tests import oracle
from tests.portable.calls import LISTS, Call


def test_wrong_metadata_gives_a_wrong_answer():
    call = Call([1000, 1000], "a16w8", splits=2)
    call.options["work_info_set"][0, 5] -= 100  # the first part ends early
    call.run()
    assert oracle.error(call.output[0], call.expected()[0]) > 0.1
    assert oracle.error(call.output[1], call.expected()[1]) < 0.004


def test_works_that_no_compute_unit_has_are_not_done():
    call = Call([1000, 1000], "a16w8", splits=1)
    call.options["work_indptr"][2:] = 1
    call.run()
    assert torch.isnan(call.output[1]).all()
    assert oracle.error(call.output[0], call.expected()[0]) < 0.004


def test_no_work_at_all_leaves_the_output_alone():
    call = Call([1000, 1000], "a16w8", splits=1)
    call.options["work_indptr"][:] = 0
    call.output.fill_(7.0)
    call.run()
    assert (call.output == 7).all()


def test_lists_moved_since_they_were_made_are_refused():
    call = Call([1000], "a16w8", splits=1)
    with pytest.raises(RuntimeError, match="points at other buffers"):
        call.run(work_info_set=call.options["work_info_set"].clone())
    with pytest.raises(RuntimeError, match="all six lists"):
        call.run(reduce_indptr=None)


def test_lists_of_another_batch_are_refused():
    """Made for four sequences; the call has two, of half the length."""
    call, other = Call([500, 500], "a16w8", splits=2), Call([1000] * 4, "a16w8", splits=2)
    with pytest.raises(ValueError, match="make the lists anew with get_mla_metadata_v1 for this batch"):
        call.run(**{name: other.options[name] for name in LISTS})
    assert torch.isnan(call.output).all()


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("work_indptr", (1,), -1, "work_indptr falls from 0 at 0 to -1"),
        ("work_indptr", (0,), -1, "work_indptr starts at -1"),
        ("work_indptr", (slice(5, None),), 9, "work_indptr ends at 9, work_info_set has 4 rows"),
        ("work_info_set", (1, 0), 2, "of sequence 2,"),
        ("work_info_set", (1, 1), 4, "and part 4; this call has 2 rows, 2000 entries, 2 sequences, 4 parts"),
        ("work_info_set", (1, 2), 2, "takes query rows 2 to 1"),
        ("work_info_set", (1, 2), -1, "takes query rows -1 to 1"),
        ("work_info_set", (1, 3), 2, "takes query rows 0 to 2"),
        ("work_info_set", (1, 4), 1000, "entries 1000 to 1000 of sequence 0"),
        ("work_info_set", (0, 4), -1, "entries -1 to"),
        ("work_info_set", (3, 5), 2001, "to 2001 of sequence 1"),
        ("reduce_indptr", (1,), -3, "gives tile 1 parts -3 to 4"),
        ("reduce_indptr", (2,), 5, "gives tile 1 parts 2 to 5, reduce_partial_map has 4"),
        ("reduce_final_map", (0, 0), -1, "writes rows -1 to 1 for tile 0"),
        ("reduce_final_map", (1, 1), 3, "writes rows 1 to 3 for tile 1"),
        ("reduce_partial_map", (3,), 4, "names part 4 for tile 1, there are 4"),
        ("reduce_partial_map", (0,), -1, "names part -1 for tile 0"),
    ],
)
def test_values_out_of_bounds(name, place, value, message):
    call = Call([1000, 1000], "a16w8", splits=2)
    call.options[name][place] = value
    with pytest.raises(ValueError, match=message):
        call.run()
    assert torch.isnan(call.output).all()


def test_a_tile_without_a_place_in_the_output():
    call = Call([1000, 1000], "a16w8", splits=2)
    with pytest.raises(ValueError, match="speaks of tile 1, reduce_final_map has 1"):
        call.run(reduce_final_map=call.options["reduce_final_map"][:1])


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("work_meta_data", lambda t: t.view(torch.int64), TypeError, r"expected \(2,\) torch.uint64"),
        ("work_meta_data", lambda t: t.tolist(), TypeError, "work_meta_data must be a tensor, got a list"),
        ("work_indptr", lambda t: t.long(), TypeError, "work_indptr is torch.int64"),
        ("work_info_set", lambda t: t[:, :4].contiguous(), ValueError, r"\(4, 4\), expected \(n, 8\)"),
        ("work_info_set", lambda t: t.flatten(), ValueError, r"\(32,\), expected \(n, 8\)"),
        ("reduce_indptr", lambda t: t[:0], ValueError, r"reduce_indptr has shape \(0,\)"),
        ("reduce_partial_map", lambda t: t.repeat(2)[::2], ValueError, "reduce_partial_map has strides"),
        ("reduce_final_map", lambda t: t.to("meta"), ValueError, "reduce_final_map is on meta"),
    ],
)
def test_lists_of_another_kind(name, change, error, message):
    call = Call([1000, 1000], "a16w8", splits=2)
    with pytest.raises(error, match=message):
        call.run(**{name: change(call.options[name])})
    assert torch.isnan(call.output).all()
