"""mla_decode_fwd, as on an MI355X: what it takes, returns and writes. The arithmetic is in `kernels`."""

import itertools
import warnings
from dataclasses import dataclass

import torch

from . import checks
from .kernels import Cache, Kernel, attend, merge, workspace
from .settings import host_lists, host_reads, settings
from .utility import dtypes

_WHERE = "mla_decode_fwd"


class PagingWarning(UserWarning):
    """page_size above 1 leaves out tokens."""


def mla_decode_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: torch.Tensor | None = None,
    work_meta_data: torch.Tensor | None = None,
    work_indptr: torch.Tensor | None = None,
    work_info_set: torch.Tensor | None = None,
    reduce_indptr: torch.Tensor | None = None,
    reduce_final_map: torch.Tensor | None = None,
    reduce_partial_map: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one query token per sequence over its paged cache, written into `o`.

    q: (rows, 16, 576) bf16 or fp8, contiguous; row b is sequence b's. kv_buffer: (pages, page_size, 1, 576) bf16 or
    fp8; keys are all dims, values the first 512. o: (rows, 16, 512) bf16; where a reduce writes it (non-persistent, but
    for fp8 in one split) also fp16 or float32. qo_indptr, kv_indptr: int32 (batch + 1,), kv_indptr counting pages.
    kv_indices: int32, a page per entry. kv_last_page_lens: int32 (batch,), read by no gfx950 kernel. q_scale, kv_scale:
    float32 (1,) for fp8. sm_scale: by default 576^-0.5. With work_meta_data and the five lists of get_mla_metadata_v1
    the call is persistent and does what those lists say.

    Rows of `o` beyond the batch, and those of sequences without a query row (at the end of the batch), are left alone.
    A sequence without tokens gives NaN; with fp8 in one split, where there is no reduce, its row is left alone.

    Returns, as the real one does: non-persistent fp8 in one split, a view of `o` and an lse that is never written
    (NaN); else the float32 partials (NaN where nothing was written) and the final lse (None, or NaN where the real one
    leaves it unwritten).

    Raises RuntimeError for what the real library refuses, AssertionError for logit_cap above 0, NotImplementedError for
    heads ≠ 16 or more than one query token; and, all of it before any work, TypeError or ValueError for what the real
    library does not check: what would make its kernels read or write elsewhere, or give noise. Warns (PagingWarning)
    when page_size > 1 leaves out tokens.
    """
    assert logit_cap <= 0, f"{logit_cap=} is not supported"
    persistent = work_meta_data is not None
    checks.need_tensors(_WHERE, q=q, kv_buffer=kv_buffer, o=o)
    kernel = checks.kernel_for(q, kv_buffer, persistent)
    checks.check_shapes(q, kv_buffer, o, max_seqlen_q, page_size, nhead_kv)
    checks.check_scales(q, kv_buffer, q_scale, kv_scale)
    checks.need_device(_WHERE, q.device, kv_buffer=kv_buffer, o=o)
    indices = {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_lens": kv_last_page_lens,
    }
    checks.need_int32(_WHERE, q.device, **indices)
    batch = checks.batch_of(_WHERE, "qo_indptr", qo_indptr)
    checks.need_length(_WHERE, "kv_indptr", kv_indptr, batch + 1, "as qo_indptr")
    checks.need_length(_WHERE, "kv_indices", kv_indices, 0, "a page per entry")
    checks.need_length(_WHERE, "kv_last_page_lens", kv_last_page_lens, batch, "one per sequence of qo_indptr")
    scale = float(sm_scale) if sm_scale is not None else q.shape[2] ** -0.5
    checks.check_sm_scale(scale)
    if page_size > 1 and not settings.documented_paging:
        warnings.warn(
            f"page_size {page_size}: the gfx950 kernels read the first token of each page and no other, so this call "
            f"attends to 1/{page_size} of the cache",
            PagingWarning,
            stacklevel=2,
        )
    call = _Call(q, kv_buffer, o, *indices.values(), batch, q_scale, kv_scale, scale, kernel)
    with host_reads(q.device):
        if not persistent:
            return _non_persistent(call, num_kv_splits, num_kv_splits_indptr)
        lists = {
            "work_meta_data": work_meta_data,
            "work_indptr": work_indptr,
            "work_info_set": work_info_set,
            "reduce_indptr": reduce_indptr,
            "reduce_final_map": reduce_final_map,
            "reduce_partial_map": reduce_partial_map,
        }
        return _persistent(call, lists, return_lse)


@dataclass(frozen=True)
class _Call:
    """One call's tensors, checked as far as that goes without their values."""

    q: torch.Tensor
    kv_buffer: torch.Tensor
    o: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_lens: torch.Tensor
    batch: int
    q_scale: torch.Tensor | None
    kv_scale: torch.Tensor | None
    sm_scale: float
    kernel: Kernel

    def read_layout(self, *lists: torch.Tensor) -> tuple["_Layout", list[list[int]]]:
        """The layout of the batch, checked, and the values of further int32 tensors, in a single read."""
        per_sequence = self.qo_indptr, self.kv_indptr[: self.batch + 1], self.kv_last_page_lens[: self.batch]
        rows, entries, last_page_lens, *rest = host_lists(*per_sequence, *lists)
        checks.check_query_rows(_WHERE, "qo_indptr", rows)
        checks.check_bounds(_WHERE, "kv_indptr", entries)
        checks.check_entries(entries, self.kv_indices)
        if settings.documented_paging:
            checks.check_last_pages(last_page_lens, self.kv_buffer.shape[1])
        return _Layout(rows[-1], entries, last_page_lens), rest

    def queries(self) -> torch.Tensor:
        return self.q.float() if self.q.dtype == dtypes.bf16 else self.q.float() * self.q_scale.reshape(())

    def cache(self, layout: "_Layout", first: int, last: int) -> Cache:
        """The cache, once entries first … last are known to name pages that it has."""
        if last > first:
            pages = torch.stack(torch.aminmax(self.kv_indices[first:last]))
            checks.check_pages(self.kv_buffer, *host_lists(pages)[0])
        scale = None if self.kv_buffer.dtype == dtypes.bf16 else self.kv_scale.reshape(())
        return Cache(self.kv_buffer, self.kv_indices, layout.entries[1:], layout.last_page_lens, scale)

    def attend(self, query: torch.Tensor, cache: Cache, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(query, cache, tokens, self.sm_scale, self.kernel)


@dataclass(frozen=True)
class _Layout:
    """Where a batch's sequences lie: how many have a query row (the first ones), kv_indptr, kv_last_page_lens."""

    queried: int
    entries: list[int]
    last_page_lens: list[int]

    @property
    def lengths(self) -> list[int]:
        """Entries per sequence."""
        return [end - start for start, end in itertools.pairwise(self.entries)]


def _choose_splits(num_kv_splits: int | None, batch: int, total_kv: int, q_dtype: torch.dtype) -> int:
    """Splits of a non-persistent call without an indptr: aiter.mla.get_meta_param's rule."""
    average = total_kv / batch
    if num_kv_splits is None:
        cus = settings.num_cus

        def merit(i: int) -> float:
            return batch * i / (-(-batch * i // cus) * cus) * average / (average + 84.1 * i)

        num_kv_splits = max(range(1, 17), key=merit)
    if q_dtype == dtypes.fp8:
        num_kv_splits = min(num_kv_splits, int(average + 127) // 128)
    return num_kv_splits


def _non_persistent(
    call: _Call, num_kv_splits: int | None, num_kv_splits_indptr: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if num_kv_splits is not None:
        checks.check_split_count(num_kv_splits)
    given = []
    if num_kv_splits is None or num_kv_splits_indptr is None:
        num_kv_splits = _choose_splits(num_kv_splits, call.batch, call.kv_indices.shape[0], call.q.dtype)
        checks.check_split_count(num_kv_splits)
    else:
        checks.need_int32(_WHERE, call.q.device, num_kv_splits_indptr=num_kv_splits_indptr)
        checks.need_length(_WHERE, "num_kv_splits_indptr", num_kv_splits_indptr, call.batch + 1, "as qo_indptr")
        given = [num_kv_splits_indptr[: call.batch + 1]]
    direct = num_kv_splits == 1 and call.q.dtype == dtypes.fp8
    checks.check_output(call.o, whole=direct)
    layout, splits = call.read_layout(*given)
    lengths = layout.lengths
    checks.check_rows(call.q, call.o, max([layout.queried, *(b + 1 for b, n in enumerate(lengths) if n)]))
    if splits and not direct:
        checks.check_splits(num_kv_splits, splits[0], lengths[: layout.queried])
    cache, queries = call.cache(layout, layout.entries[0], layout.entries[-1]), call.queries()
    partial, lse = workspace(call.o.shape[0], num_kv_splits, device=call.q.device)
    for b, (start, end) in enumerate(itertools.pairwise(layout.entries)):
        tiles = cache.tokens(b, start, end).split(checks.SPLIT_TILE) if end > start else ()
        parts = min(num_kv_splits, len(tiles))
        for s in range(parts):
            partial[b, s], lse[b, s] = call.attend(queries[b], cache, torch.cat(tiles[s::num_kv_splits]))
        if direct and parts:
            call.o[b] = partial[b, 0].to(call.o.dtype)
        elif not direct and b < layout.queried:
            call.o[b] = merge(partial[b, :parts], lse[b, :parts])[0].to(call.o.dtype)
    if direct:
        return call.o.view(call.o.shape), torch.full_like(lse, torch.nan)[..., None]
    return partial, torch.full_like(lse[:, 0], torch.nan)


def _persistent(
    call: _Call, lists: dict[str, torch.Tensor | None], return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    checks.check_lists(_WHERE, lists, call.q.device)
    checks.check_output(call.o, whole=True)
    meta, *lists = lists.values()
    pointers = torch.tensor([buffer.data_ptr() for buffer in lists[:2]]).view(torch.int32).tolist()
    layout, (found, cu_works, works, spans, final_map, partial_map) = call.read_layout(meta.view(torch.int32), *lists)
    if found != pointers:
        raise RuntimeError(
            "mla_decode_fwd: work_meta_data points at other buffers than the work_indptr and work_info_set given. The "
            "real kernel follows the pointers: keep the buffers that get_mla_metadata_v1 filled alive, and pass those"
        )
    works, final_map = _rows(works, 8), _rows(final_map, 2)
    rows = min(call.q.shape[0], call.o.shape[0])
    checks.check_works(cu_works, works, call.batch, call.kv_indices.shape[0], rows, len(partial_map))
    checks.check_reduce(spans, final_map, partial_map, call.o.shape[0])

    works = works[cu_works[0] : cu_works[-1]]
    first, last = min((work[4] for work in works), default=0), max((work[5] for work in works), default=0)
    cache, queries = call.cache(layout, first, last), call.queries()
    partial, lse = workspace(len(partial_map), device=call.q.device)
    for b, place, row, _, start, end, *_ in works:
        out, part_lse = call.attend(queries[row], cache, cache.tokens(b, start, end))
        if place < 0:
            call.o[row] = out.to(call.o.dtype)
        else:
            partial[place], lse[place] = out, part_lse
    final_lse = lse.new_full((call.o.shape[0], lse.shape[1]), torch.nan) if return_lse else None
    for tile, (start, end) in enumerate(itertools.pairwise(spans)):
        if end - start > 1:
            places, row = partial_map[start:end], final_map[tile][0]
            whole, whole_lse = merge(partial[places], lse[places])
            call.o[row] = whole.to(call.o.dtype)
            if final_lse is not None:
                final_lse[row] = whole_lse
    return partial[:, None], final_lse


def _rows(values: list[int], width: int) -> list[list[int]]:
    return [values[i : i + width] for i in range(0, len(values), width)]
