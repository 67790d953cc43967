"""mla_decode_fwd: what the gfx950 decode kernels compute, in float32 torch with their rounding points."""

import itertools
import warnings
from collections.abc import Callable

import torch

from .settings import NUM_HEADS, host_reads, settings
from .utility import dtypes

_VALUES = 512  # the value dims: the first of the key's
_TILE = 64  # tokens between two updates of the running maximum; also what non-persistent splits are dealt in
_CHUNK = 128 * _TILE  # tokens dequantised at a time

_Rounding = Callable[[torch.Tensor], torch.Tensor]


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
    """Attention of one query token a sequence over its paged cache, written into `o`.

    q: (batch, 16, dims) bf16 or fp8, contiguous. kv_buffer: (pages, page_size, 1, dims) bf16 or fp8; keys are all dims,
    values the first 512. o: (batch, 16, 512) bf16. The indptrs are int32 (batch + 1,), kv_indptr counting pages;
    kv_indices (entries,) int32. q_scale, kv_scale: (1,) float32 for fp8. With work_meta_data and the five lists of
    get_mla_metadata_v1 the call is persistent and does what those lists say.

    Returns, as the real one does: non-persistent fp8 in one split, a view of `o` and its lse; else the float32 partials
    (NaN where nothing was written) and the final lse (None, or NaN where the real one leaves it unwritten).

    Raises RuntimeError for combinations no gfx950 kernel serves, AssertionError for logit_cap above 0,
    NotImplementedError for heads ≠ 16 or more than one query token. Warns (PagingWarning) when page_size > 1 leaves out
    tokens.
    """
    assert logit_cap <= 0, f"{logit_cap=} is not supported"
    persistent = work_meta_data is not None
    _check_call(q, kv_buffer, o, max_seqlen_q, nhead_kv, page_size, persistent, q_scale, kv_scale)
    with host_reads(q.device):
        scale = sm_scale if sm_scale is not None else q.shape[2] ** -0.5
        cache = _Cache(kv_buffer, kv_indptr, kv_indices, kv_last_page_lens, page_size, kv_scale)
        if persistent:
            lists = (work_meta_data, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
            return _persistent(_queries(q, q_scale), cache, o, scale, _rounding(q), lists, return_lse)
        if num_kv_splits is None or num_kv_splits_indptr is None:
            num_kv_splits = _choose_splits(num_kv_splits, qo_indptr.shape[0] - 1, kv_indices.shape[0], q.dtype)
            num_kv_splits_indptr = torch.arange(qo_indptr.shape[0], dtype=torch.int32) * num_kv_splits
        direct = num_kv_splits == 1 and q.dtype == dtypes.fp8
        return _non_persistent(
            _queries(q, q_scale), cache, o, scale, _rounding(q), num_kv_splits, num_kv_splits_indptr.tolist(), direct
        )


def _check_call(q, kv_buffer, o, max_seqlen_q, nhead_kv, page_size, persistent, q_scale, kv_scale) -> None:
    names = {dtypes.bf16: "bf16", dtypes.fp8: "fp8"}
    kinds = (names.get(q.dtype), names.get(kv_buffer.dtype), persistent)
    served = {
        ("bf16", "bf16", False),
        ("fp8", "fp8", False),
        ("bf16", "fp8", True),
        ("fp8", "fp8", True),
        ("bf16", "bf16", True),
    }
    if kinds not in served:
        raise RuntimeError(
            f"mla_decode_fwd: no gfx950 kernel for q {q.dtype}, kv {kv_buffer.dtype}, "
            f"{'persistent' if persistent else 'non-persistent'}"
        )
    if kv_buffer.dim() != 4 or kv_buffer.shape[1:3] != (page_size, 1) or nhead_kv != 1:
        raise RuntimeError(
            f"mla_decode_fwd: kv_buffer must be (pages, page_size {page_size}, 1, dims) with nhead_kv 1, "
            f"got {tuple(kv_buffer.shape)} and nhead_kv {nhead_kv}"
        )
    if not q.is_contiguous():
        raise RuntimeError("mla_decode_fwd: q must be contiguous")
    if q.shape[-1] != kv_buffer.shape[3]:
        raise RuntimeError(f"mla_decode_fwd: q has {q.shape[-1]} dims, kv_buffer {kv_buffer.shape[3]}")
    if q.dtype == dtypes.fp8 and (q_scale is None or kv_scale is None):
        raise RuntimeError("mla_decode_fwd: fp8 q needs both q_scale and kv_scale")
    if q.shape[1] != NUM_HEADS or max_seqlen_q != 1 or o.shape != (q.shape[0], NUM_HEADS, _VALUES):
        raise NotImplementedError(
            "the portable aiter has 16 heads, one query token and an output of (batch, 16, 512) only; "
            f"got q {tuple(q.shape)}, max_seqlen_q {max_seqlen_q}, o {tuple(o.shape)}"
        )


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


def _queries(q: torch.Tensor, q_scale: torch.Tensor | None) -> torch.Tensor:
    return q.float() * q_scale if q.dtype == dtypes.fp8 else q.float()


def _rounding(q: torch.Tensor) -> _Rounding:
    """How the kernel for this q rounds the unnormalised probabilities before the value product."""
    return _to_fp8 if q.dtype == dtypes.fp8 else _to_bf16


def _to_fp8(p: torch.Tensor) -> torch.Tensor:
    return p.to(torch.float8_e4m3fn).float()


def _to_bf16(p: torch.Tensor) -> torch.Tensor:
    return ((p.view(torch.int32) + 0x7FFF) & -0x10000).view(torch.float32)


class _Cache:
    """Which cache rows a range of kv_indices entries stands for, dequantised on demand."""

    def __init__(self, kv_buffer, kv_indptr, kv_indices, kv_last_page_lens, page_size, kv_scale):
        self.indptr = kv_indptr.tolist()
        self._indices = kv_indices.long()
        self._last_page_lens = kv_last_page_lens.tolist()
        self._page_size = page_size
        self._whole_pages = page_size > 1 and settings.documented_paging
        # Bytes, not float8: indexing float8 is not implemented on every device.
        self._rows = kv_buffer[:, :, 0].view(torch.uint8) if kv_buffer.dtype == dtypes.fp8 else kv_buffer[:, :, 0]
        self._dtype = kv_buffer.dtype
        # A missing scale is an uninitialised pointer in the real library.
        self._scale = 1.0 if kv_buffer.dtype == dtypes.bf16 else torch.nan if kv_scale is None else kv_scale
        if page_size > 1 and not settings.documented_paging:
            warnings.warn(
                f"page_size {page_size}: the gfx950 kernels read the first token of each page and no other, so this "
                f"call attends to 1/{page_size} of the cache",
                PagingWarning,
                stacklevel=4,
            )

    def tokens(self, sequence: int, start: int, stop: int) -> torch.Tensor:
        """Rows (page × page_size + place) of entries start … stop, which belong to `sequence`; int64."""
        pages = self._indices[start:stop]
        if not self._whole_pages:
            return pages * self._page_size
        rows = (pages[:, None] * self._page_size + torch.arange(self._page_size, device=pages.device)).flatten()
        ends_sequence = stop == self.indptr[sequence + 1]
        return rows[: rows.shape[0] - self._page_size + self._last_page_lens[sequence]] if ends_sequence else rows

    def load(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, dims) float32 values of those rows, times the scale."""
        rows = self._rows[tokens // self._page_size, tokens % self._page_size]
        return rows.view(self._dtype).float() * self._scale


def _attend(
    q: torch.Tensor, cache: _Cache, tokens: torch.Tensor, sm_scale: float, rounding: _Rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query over some tokens: (16, 512) float32 normalised, and its natural-log lse (16,).

    The kernels keep a running maximum a tile of tokens and round exp(score − running maximum); the row sum is not
    rounded.
    """
    top = q.new_full((NUM_HEADS,), -torch.inf)
    total = q.new_zeros(NUM_HEADS)
    out = q.new_zeros(NUM_HEADS, _VALUES)
    for part in tokens.split(_CHUNK):
        kv = cache.load(part)
        scores = q @ kv.T * sm_scale
        tiles = torch.nn.functional.pad(scores, (0, -scores.shape[1] % _TILE), value=-torch.inf).unflatten(
            1, (-1, _TILE)
        )
        running = torch.cummax(torch.cat([top[:, None], tiles.amax(-1)], 1), 1).values[:, 1:]
        probabilities = torch.exp(tiles - running[..., None])
        new_top = running[:, -1]
        rescale = torch.exp(running - new_top[:, None])
        keep = torch.exp(top - new_top)
        total = total * keep + (probabilities.sum(-1) * rescale).sum(-1)
        weights = (rounding(probabilities) * rescale[..., None]).flatten(1)[:, : scores.shape[1]]
        out = out * keep[:, None] + weights @ kv[:, :_VALUES]
        top = new_top
    return out / total[:, None], top + torch.log(total)


def _merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts (n, 16, 512) and (n, 16) to the whole and its lse; no parts at all give NaN, as 0/0 does in the real
    reduce."""
    if not outs.shape[0]:
        return outs.new_full(outs.shape[1:], torch.nan), lses.new_full(lses.shape[1:], torch.nan)
    top = lses.amax(0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    return (outs * weights[..., None]).sum(0) / total[:, None], top + torch.log(total)


def _workspace(parts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials (parts, 16, 512) and their lse (parts, 16), NaN until written."""
    partial = torch.full((parts, NUM_HEADS, _VALUES), torch.nan, device=device)
    return partial, torch.full((parts, NUM_HEADS), torch.nan, device=device)


def _non_persistent(q, cache, o, sm_scale, rounding, max_splits, splits_indptr, direct):
    batch = q.shape[0]
    partial, lse = _workspace(batch * max_splits, q.device)
    partial, lse = partial.unflatten(0, (batch, max_splits)), lse.unflatten(0, (batch, max_splits))
    for b in range(batch):
        splits = splits_indptr[b + 1] - splits_indptr[b]
        tiles = cache.tokens(b, cache.indptr[b], cache.indptr[b + 1]).split(_TILE)
        written = min(splits, len(tiles)) if tiles[0].numel() else 0
        for s in range(written):
            partial[b, s], lse[b, s] = _attend(q[b], cache, torch.cat(tiles[s::splits]), sm_scale, rounding)
        o[b] = _merge(partial[b, :written], lse[b, :written])[0].to(o.dtype)
    if direct:
        return o.view(batch, NUM_HEADS, _VALUES), lse[..., None]
    return partial, torch.full((batch, NUM_HEADS), torch.nan, device=q.device)


def _persistent(q, cache, o, sm_scale, rounding, lists, return_lse):
    meta, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map = lists
    if any(buffer is None for buffer in lists):
        raise RuntimeError("mla_decode_fwd: a persistent call needs all six lists of get_mla_metadata_v1")
    if meta.view(torch.int64).tolist() != [work_indptr.data_ptr(), work_info_set.data_ptr()]:
        raise RuntimeError(
            "mla_decode_fwd: work_meta_data points at other buffers than the work_indptr and work_info_set given. The "
            "real kernel follows the pointers: keep the buffers that get_mla_metadata_v1 filled alive, and pass those"
        )
    partial, lse = _workspace(reduce_partial_map.shape[0], q.device)
    cu_works = work_indptr.tolist()
    works = work_info_set[: cu_works[-1]].tolist()
    for first, last in itertools.pairwise(cu_works):
        for b, place, qo_start, _, kv_start, kv_end, _, _ in works[first:last]:
            out, part_lse = _attend(q[qo_start], cache, cache.tokens(b, kv_start, kv_end), sm_scale, rounding)
            if place < 0:
                o[qo_start] = out.to(o.dtype)
            else:
                partial[place], lse[place] = out, part_lse
    final_lse = torch.full((q.shape[0], NUM_HEADS), torch.nan, device=q.device) if return_lse else None
    spans = reduce_indptr.tolist()
    for tile, (qo_start, _) in enumerate(reduce_final_map.tolist()):
        if spans[tile + 1] - spans[tile] > 1:
            parts = reduce_partial_map[spans[tile] : spans[tile + 1]].long()
            whole, whole_lse = _merge(partial[parts], lse[parts])
            o[qo_start] = whole.to(o.dtype)
            if final_lse is not None:
                final_lse[qo_start] = whole_lse
    return partial[:, None], final_lse
