"""Work lists: get_mla_metadata_v1 against a second implementation, its info, and what it refuses."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.portable.calls import BF16, FP8, LISTS, aiter, indptr

plan_works = aiter.metadata._plan_works
cu_counts = st.sampled_from([7, 64, 256, 304])


def fill(lengths: list[int], splits: int, replaced: dict | None = None, **changes) -> dict[str, torch.Tensor]:
    """The six lists for these lengths. replaced: arguments in the place of those made here, by name."""
    batch = len(lengths)
    info = aiter.get_mla_metadata_info_v1(
        batch, 1, 16, BF16, FP8, is_sparse=False, fast_mode=False, num_kv_splits=splits, intra_batch_mode=True
    )
    buffers = dict(zip(LISTS, (torch.empty(shape, dtype=dtype) for shape, dtype in info), strict=True))
    sequences = {"qo": indptr([1] * batch), "kv": indptr(lengths), "last": torch.ones(batch, dtype=torch.int32)}
    taken = sequences | buffers | (replaced or {})
    arguments = {
        "kv_granularity": 16, "uni_seqlen_qo": 1, "fast_mode": False, "max_split_per_batch": splits,
        "intra_batch_mode": True, **changes,
    }  # fmt: skip
    aiter.get_mla_metadata_v1(
        *(taken[name] for name in sequences), 16, 1, True, taken["work_meta_data"], taken["work_info_set"],
        taken["work_indptr"], *(taken[name] for name in LISTS[3:]), **arguments,
    )  # fmt: skip
    return buffers


def works_of(lists: dict[str, torch.Tensor]) -> list[list[int]]:
    return lists["work_info_set"][: lists["work_indptr"][-1]].tolist()


@pytest.mark.parametrize(
    ("batch", "length", "splits"),
    [
        (4, 1024, 5),
        (4, 8192, 32),
        (32, 1024, 5),
        (32, 8192, 8),
        (64, 1024, 4),
        (64, 8192, 4),
        (256, 1024, 1),
        (256, 8192, 1),
    ],
)
def test_benchmark_shapes_get_the_real_splits(batch, length, splits):
    works, parts = plan_works([i * length for i in range(batch + 1)], 16, 32)
    assert set(parts) == {splits}
    assert len(works) == batch * splits


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(196, 5000), min_size=1, max_size=40), max_splits=st.integers(1, 40), cus=cu_counts)
def test_works_tile_each_sequence_once_and_load_evenly(lengths, max_splits, cus):
    with aiter.settings.using(num_cus=cus):
        buffers = fill(lengths, max_splits)
    works, lists = works_of(buffers), {name: buffers[name].tolist() for name in LISTS[1:]}
    bounds = [0, *np.cumsum(lengths)]
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        mine = [w for w in works if w[0] == b]
        assert [w[4] for w in mine] == [begin, *[w[5] for w in mine[:-1]]]
        assert mine[-1][5] == end
        assert all(w[5] > w[4] and w[6] == end - w[5] and (w[2], w[3]) == (b, b + 1) for w in mine)
        assert len(mine) <= max_splits
        places = lists["reduce_partial_map"][lists["reduce_indptr"][b] : lists["reduce_indptr"][b + 1]]
        assert places == [w[1] for w in mine]
        assert lists["reduce_final_map"][b] == [b, b + 1]
        assert (places == [-1]) == (len(mine) == 1)
    written = [w[1] for w in works if w[1] >= 0]
    assert len(set(written)) == len(written)
    loads = np.diff(lists["work_indptr"])
    assert loads.sum() == len(works)
    assert loads.max() - loads.min() <= 1
    assert list(loads) == sorted(loads, reverse=True)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(196, 9000), min_size=1, max_size=30),
    max_splits=st.integers(1, 40),
    cus=cu_counts,
    granularity=st.sampled_from([1, 16, 64, 256]),
)
@example(lengths=[2914], max_splits=32, cus=256, granularity=16)  # the last two tokens join the part before
def test_work_lists_agree_with_a_second_implementation(lengths, max_splits, cus, granularity):
    with aiter.settings.using(num_cus=cus):
        lists = fill(lengths, max_splits, kv_granularity=granularity)
    expected = oracle.work_lists(lengths, max_splits, cus, granularity)
    assert (works_of(lists), lists["work_indptr"].tolist()) == expected


def test_a_short_tail_joins_the_part_before():
    def parts(length: int) -> list[int]:
        return [w[5] - w[4] for w in works_of(fill([length], 32))]

    # 980 tokens, 5 splits: 62 blocks of 16, 13 a split, 208 tokens; 4 × 208 = 832, the rest is 148: a split of its own.
    assert parts(980) == [208, 208, 208, 208, 148]
    # 2914 tokens, 14 splits: 183 blocks, 14 a split, 224 tokens; 13 × 224 = 2912, and the last 2 join the 13th.
    assert parts(2914) == [224] * 12 + [226]
    assert parts(2916) == [224] * 12 + [228]
    assert parts(2917) == [224] * 13 + [5]


def test_padding_of_reduce_indptr_repeats_its_end():
    longer = torch.empty(6, dtype=torch.int32)
    fill([1000, 400], 4, {"reduce_indptr": longer})
    assert longer.tolist() == [0, 4, 6, 6, 6, 6]


def test_info_sizes():
    shapes = aiter.get_mla_metadata_info_v1(
        4, 1, 16, BF16, FP8, is_sparse=False, fast_mode=False, num_kv_splits=8, intra_batch_mode=True
    )
    assert shapes == (
        (2, torch.uint64),
        (257, torch.int32),
        ((32, 8), torch.int32),
        (5, torch.int32),
        ((4, 2), torch.int32),
        (32, torch.int32),
    )


# ---- Refusals ----


@pytest.mark.parametrize(
    ("lengths", "splits", "changes", "message"),
    [
        ([195], 4, {}, "sequence 0 has 195 entries"),
        ([1000, 3], 4, {}, "sequence 1 has 3 entries"),
        ([1000, 0], 4, {}, "sequence 1 has 0 entries"),
        ([1000], 4, {"max_split_per_batch": -1}, "must be 1 or more"),
        ([1000], 2, {"max_split_per_batch": 5}, "work_info_set needs 5 rows"),
        ([1000], 4, {"kv_granularity": 12}, "kv_granularity must be a power of 2"),
        ([1000], 4, {"page_size": 3}, "page_size must be a power of 2"),
        ([514], 4, {"kv_granularity": 512}, "leave out the last 2 of the 514 entries of sequence 0"),
        ([200] * 10_240, 1, {}, "10240 sequences; the real kernel has LDS for 10239"),
    ],
)
def test_refusals_of_the_real_one(lengths, splits, changes, message):
    with pytest.raises(RuntimeError, match=message):
        fill(lengths, splits, **changes)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("replaced", "error", "message"),
    [
        ({"kv": None}, TypeError, "seqlens_kv_indptr must be a tensor, got None"),
        ({"last": None}, TypeError, "kv_last_page_lens must be a tensor, got None"),
        ({"kv": _int32(0, 400, 900).long()}, TypeError, r"seqlens_kv_indptr is torch.int64, .* read int32"),
        ({"qo": _int32(0, 9, 1, 9, 2)[::2]}, ValueError, "seqlens_qo_indptr has strides"),
        ({"kv": _int32(0)}, ValueError, r"shape \(1,\), expected \(batch \+ 1,\) for one sequence or more"),
        ({"qo": _int32(0, 1)}, ValueError, r"seqlens_qo_indptr has shape \(2,\), expected \(3,\)"),
        ({"qo": _int32(0, 0, 1)}, ValueError, r"seqlens_qo_indptr\[1\] is 0, expected 1"),
        ({"qo": _int32(0, 1, 3)}, ValueError, r"seqlens_qo_indptr\[2\] is 3, expected 2"),
        ({"kv": _int32(5, 405, 905)}, ValueError, "seqlens_kv_indptr starts at 5, expected 0"),
        ({"kv": _int32(0, 900, 400)}, ValueError, "falls from 900 at 1 to 400"),
        ({"work_indptr": torch.empty(300, dtype=torch.int32)}, ValueError, "300 entries, expected 257"),
        ({"work_indptr": torch.empty(256, dtype=torch.int32)}, RuntimeError, "needs 257 rows of int32, got 256"),
        ({"work_info_set": torch.empty(8, 4, dtype=torch.int32)}, ValueError, r"\(8, 4\), expected \(n, 8\)"),
        ({"reduce_final_map": torch.empty(1, 2, dtype=torch.int32)}, RuntimeError, "needs 2 rows"),
        ({"reduce_partial_map": torch.empty(8)}, TypeError, "reduce_partial_map is torch.float32"),
        ({"reduce_indptr": None}, RuntimeError, "all six lists"),
        ({"work_meta_data": torch.empty(2, dtype=torch.int64)}, TypeError, r"expected \(2,\) torch.uint64"),
        ({"last": torch.ones(2, dtype=torch.int32, device="meta")}, ValueError, "kv_last_page_lens is on meta"),
    ],
)
def test_nothing_is_written_when_a_tensor_is_wrong(replaced, error, message):
    kept = {"reduce_partial_map": torch.full((8,), -7, dtype=torch.int32)} | replaced
    with pytest.raises(error, match=message):
        fill([400, 500], 4, kept)
    if "reduce_partial_map" not in replaced:
        assert (kept["reduce_partial_map"] == -7).all()


@pytest.mark.parametrize(
    "change", [{"fast_mode": True}, {"intra_batch_mode": False}, {"uni_seqlen_qo": 2}, {"topk": 8}]
)
def test_other_modes_are_named_as_missing(change):
    with pytest.raises(NotImplementedError, match="the portable aiter makes metadata for"):
        fill([1000], 4, **change)


@pytest.mark.parametrize(("batch", "splits", "message"), [(0, 4, "batch_size is 0"), (4, 0, "num_kv_splits is 0")])
def test_info_of_nothing_is_refused(batch, splits, message):
    with pytest.raises(ValueError, match=message):
        aiter.get_mla_metadata_info_v1(batch, 1, 16, BF16, FP8, False, False, splits, True)
