"""Work lists for the persistent kernels: which compute unit attends to which tokens, and how the parts are reduced.

Only the mode that the contest's reference uses is here: fast_mode=False, intra_batch_mode=True, 16 heads, one query
token.
"""

import torch

from . import checks
from .kernels import NUM_HEADS
from .settings import host_lists, host_reads, settings

_WHERE = "get_mla_metadata_v1"

# The rule is that of csrc/kernels/mla/metadata/v1_0_device.cuh.
TOKENS_PER_SPLIT = 196  # a sequence gets len // 196 splits at the most
_TAIL = 4  # a last part of 1…4 entries is taken over by the part before it
_MOST_SEQUENCES = (160 * 1024 // 4 - 1) // 4  # four int32 each and one more, in 160 KiB


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
) -> tuple[tuple[int | tuple[int, int], torch.dtype], ...]:
    """Shapes and dtypes of the six buffers that get_mla_metadata_v1 fills.

    In this order: work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map.
    (get_mla_metadata_v1 itself takes work_info_set before work_indptr.) The dtypes given do not matter at 16 heads.

    Raises ValueError for an empty batch or no splits, NotImplementedError outside the portable scope.
    """
    _in_scope(fast_mode, intra_batch_mode, num_head_qo, max_seqlen_qo, sparse=is_sparse)
    for name, count in {"batch_size": batch_size, "num_kv_splits": num_kv_splits}.items():
        if count < 1:
            raise ValueError(f"get_mla_metadata_info_v1: {name} is {count}, expected 1 or more")
    works = batch_size * num_kv_splits
    return (
        (2, torch.uint64),
        (settings.num_cus + 1, torch.int32),
        ((works, 8), torch.int32),
        (batch_size + 1, torch.int32),
        ((batch_size, 2), torch.int32),
        (works, torch.int32),
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """Fill the work lists for sequences of seqlens_kv_indptr[b + 1] − seqlens_kv_indptr[b] entries (pages).

    A work is 8 int32: batch, partial_qo_loc (−1: writes the output itself), qo_start, qo_end, kv_start, kv_end,
    kv_offset (entries left after kv_end), 0. Compute unit c does works work_indptr[c] … work_indptr[c + 1].

    Raises, before anything is written: RuntimeError where the real one refuses, divides by zero (a sequence under 196
    entries) or would write past a buffer; TypeError or ValueError for tensors and lengths that it takes unchecked and
    misreads; NotImplementedError outside the portable scope.
    """
    _in_scope(fast_mode, intra_batch_mode, num_heads_per_head_k * num_heads_k, uni_seqlen_qo, sparse=topk >= 0)
    for name, size in {"kv_granularity": kv_granularity, "page_size": page_size}.items():
        if size < 1 or size & (size - 1):
            raise RuntimeError(f"{_WHERE}: {name} must be a power of 2, got {size}")
    if max_split_per_batch < 1:
        raise RuntimeError(
            f"{_WHERE}: max_split_per_batch is {max_split_per_batch}; in intra-batch mode it caps the number of "
            "splits, so it must be 1 or more"
        )
    checks.need_tensors(_WHERE, seqlens_kv_indptr=seqlens_kv_indptr)
    device = seqlens_kv_indptr.device
    sequences = {
        "seqlens_qo_indptr": seqlens_qo_indptr,
        "seqlens_kv_indptr": seqlens_kv_indptr,
        "kv_last_page_lens": kv_last_page_lens,
    }
    checks.need_int32(_WHERE, device, **sequences)
    batch = checks.batch_of(_WHERE, "seqlens_kv_indptr", seqlens_kv_indptr)
    checks.need_length(_WHERE, "seqlens_qo_indptr", seqlens_qo_indptr, batch + 1, "as seqlens_kv_indptr")
    checks.need_length(_WHERE, "kv_last_page_lens", kv_last_page_lens, batch, "one per sequence")
    if batch > _MOST_SEQUENCES:
        raise RuntimeError(f"{_WHERE}: {batch} sequences; the real kernel has LDS for {_MOST_SEQUENCES}")
    lists = {
        "work_metadata_ptrs": work_metadata_ptrs,
        "work_indptr": work_indptr,
        "work_info_set": work_info_set,
        "reduce_indptr": reduce_indptr,
        "reduce_final_map": reduce_final_map,
        "reduce_partial_map": reduce_partial_map,
    }
    checks.check_lists(_WHERE, lists, device)

    with host_reads(device):
        rows, indptr = host_lists(seqlens_qo_indptr[: batch + 1], seqlens_kv_indptr)
        checks.check_query_rows(_WHERE, "seqlens_qo_indptr", rows)
        checks.check_bounds(_WHERE, "seqlens_kv_indptr", indptr)
        if indptr[0]:
            raise ValueError(
                f"{_WHERE}: seqlens_kv_indptr starts at {indptr[0]}, expected 0: the real kernel takes 0 for it"
            )
        works, parts = _plan_works(indptr, kv_granularity, max_split_per_batch)
        filled = {
            "work_indptr": _deal(len(works), settings.num_cus),
            "work_info_set": works,
            "reduce_indptr": _running_total(parts, reduce_indptr.shape[0]),
            "reduce_final_map": [[b, b + 1] for b in range(batch)],
            "reduce_partial_map": [work[1] for work in works],
        }
        for name, values in filled.items():
            _check_size(name, lists[name].shape[0], len(values))
        for name, values in filled.items():
            lists[name][: len(values)].copy_(torch.tensor(values, dtype=torch.int32))
        pointers = [work_indptr.data_ptr(), work_info_set.data_ptr()]
        work_metadata_ptrs.view(torch.int64).copy_(torch.tensor(pointers))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _plan_works(indptr: list[int], granularity: int, max_splits: int) -> tuple[list[list[int]], list[int]]:
    """The works of all sequences in order, and how many each sequence got."""
    batch = len(indptr) - 1
    works: list[list[int]] = []
    parts: list[int] = []
    for b in range(batch):
        begin, end = indptr[b], indptr[b + 1]
        splits = min((end - begin) // TOKENS_PER_SPLIT, _ceil_div(settings.num_cus, batch), max_splits)
        if splits < 1:
            raise RuntimeError(
                f"{_WHERE}: sequence {b} has {end - begin} entries; under {TOKENS_PER_SPLIT} it gets no "
                "split and the real kernel divides by zero on the device: use a non-persistent kernel"
            )
        payload = _ceil_div(_ceil_div(end - begin, granularity), splits) * granularity
        splits = _ceil_div(end - begin, payload)
        tail = (end - begin) % payload
        if splits > 1 and 1 <= tail <= _TAIL:
            splits -= 1
            if splits == 1:
                raise RuntimeError(
                    f"{_WHERE}: the real kernel would leave out the last {tail} of the {end - begin} entries of "
                    f"sequence {b}: use a kv_granularity below {granularity}"
                )
        for s in range(splits):
            start = begin + s * payload
            stop = end if s == splits - 1 else start + payload
            works.append([b, len(works) if splits > 1 else -1, b, b + 1, start, stop, end - stop, 0])
        parts.append(splits)
    return works, parts


def _deal(num_works: int, num_cus: int) -> list[int]:
    """work_indptr: works dealt in order, the first num_works mod num_cus compute units one more."""
    each, extra = divmod(num_works, num_cus)
    return [cu * each + min(cu, extra) for cu in range(num_cus + 1)]


def _running_total(parts: list[int], size: int) -> list[int]:
    """reduce_indptr, its last value repeated to `size`."""
    totals = [0]
    for part in parts:
        totals.append(totals[-1] + part)
    return totals + totals[-1:] * (size - len(totals))


def _check_size(name: str, size: int, needed: int) -> None:
    if size < needed:
        raise RuntimeError(
            f"{_WHERE}: {name} needs {needed} rows of int32, got {size}; the real kernel would write past its end: "
            "size it with get_mla_metadata_info_v1 and the same num_kv_splits"
        )
    if name == "work_indptr" and size > needed:
        raise ValueError(
            f"{_WHERE}: work_indptr has {size} entries, expected {needed}, one per compute unit and one more: the "
            "decode kernel starts as many workgroups, and the real kernel leaves the rest of it unwritten"
        )


def _in_scope(fast_mode: bool, intra_batch_mode: bool, heads: int, q_len: int, sparse: bool) -> None:
    if fast_mode or not intra_batch_mode or sparse or heads != NUM_HEADS or q_len != 1:
        raise NotImplementedError(
            "the portable aiter makes metadata for fast_mode=False, intra_batch_mode=True, 16 heads, one query token "
            f"and dense attention only; got {fast_mode=}, {intra_batch_mode=}, {heads=}, {q_len=}, {sparse=}"
        )
