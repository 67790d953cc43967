"""What a call must be, checked before any work.

The real library checks little: it hands pointers to kernels. Where a kernel would then read or write memory that is not
the caller's, take one sequence's data for another's, hang, or give noise, the call is refused here with what was
passed, what was expected and what to do.
"""

import itertools
from collections.abc import Sequence

import torch

from .kernels import KERNELS, KEY_DIMS, NUM_HEADS, VALUE_DIMS, Kernel
from .utility import dtypes

SPLIT_TILE = 64  # tokens that the non-persistent kernels deal to their splits at a time
# The kernels address the cache by page number × page stride, 24 bits each, in a 32-bit offset.
_PAGE_NUMBERS = 1 << 24
_CACHE_BYTES = (1 << 32) - 16


def need_tensors(where: str, **tensors: object) -> None:
    """Raises TypeError for an argument that is not a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{where}: {name} must be a tensor, got {_kind(tensor)}")


def need_device(where: str, device: torch.device, **tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor elsewhere: a kernel would follow a pointer into another memory."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{where}: {name} is on {tensor.device}, the other tensors on {device}: move it there")


def need_int32(where: str, device: torch.device, **tensors: object) -> None:
    """Raises TypeError or ValueError unless each is contiguous int32 on the device: kernels read raw int32."""
    need_tensors(where, **tensors)
    need_device(where, device, **tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{where}: {name} is {tensor.dtype}, the kernels read int32: pass {name}.to(torch.int32)")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{where}: {name} has strides {tensor.stride()}, the kernels read it as contiguous: pass "
                f"{name}.contiguous()"
            )


def need_length(where: str, name: str, tensor: torch.Tensor, length: int, why: str) -> None:
    """Raises ValueError unless the tensor has one dimension and `length` elements or more."""
    if tensor.dim() != 1 or tensor.shape[0] < length:
        raise ValueError(
            f"{where}: {name} has shape {tuple(tensor.shape)}, expected ({length},), {why}: the kernels would read "
            "what lies behind it"
        )


def batch_of(where: str, name: str, indptr: torch.Tensor) -> int:
    """How many sequences an indptr speaks of. Raises ValueError for none."""
    if indptr.dim() != 1 or indptr.shape[0] < 2:
        raise ValueError(
            f"{where}: {name} has shape {tuple(indptr.shape)}, expected (batch + 1,) for one sequence or more"
        )
    return indptr.shape[0] - 1


def kernel_for(q: torch.Tensor, kv_buffer: torch.Tensor, persistent: bool) -> Kernel:
    """The kernel for these dtypes. Raises RuntimeError where gfx950 has none."""
    kernel = KERNELS.get((q.dtype, kv_buffer.dtype, persistent))
    if kernel is None:
        raise RuntimeError(
            f"mla_decode_fwd: no gfx950 kernel for q {q.dtype}, kv {kv_buffer.dtype}, "
            f"{'persistent' if persistent else 'non-persistent'}"
        )
    return kernel


def check_shapes(
    q: torch.Tensor, kv_buffer: torch.Tensor, o: torch.Tensor, max_seqlen_q: int, page_size: int, nhead_kv: int
) -> None:
    """Raises RuntimeError for what the real library refuses, NotImplementedError for what only it can do, ValueError
    for a cache that the kernels would read past."""
    if kv_buffer.dim() != 4 or kv_buffer.shape[1:3] != (page_size, 1) or nhead_kv != 1:
        raise RuntimeError(
            f"mla_decode_fwd: kv_buffer must be (pages, page_size {page_size}, 1, dims) with nhead_kv 1, "
            f"got {tuple(kv_buffer.shape)} and nhead_kv {nhead_kv}"
        )
    if not q.is_contiguous():
        raise RuntimeError("mla_decode_fwd: q must be contiguous")
    if q.shape[-1] != kv_buffer.shape[3]:
        raise RuntimeError(f"mla_decode_fwd: q has {q.shape[-1]} dims, kv_buffer {kv_buffer.shape[3]}")
    if q.shape[1:] != (NUM_HEADS, KEY_DIMS) or o.shape[1:] != (NUM_HEADS, VALUE_DIMS) or max_seqlen_q != 1:
        raise NotImplementedError(
            f"the portable aiter has 16 heads, one query token, q of (rows, 16, {KEY_DIMS}) and o of (rows, 16, "
            f"{VALUE_DIMS}) only; got q {tuple(q.shape)}, o {tuple(o.shape)}, max_seqlen_q {max_seqlen_q}"
        )
    if kv_buffer.stride(3) != 1:
        raise ValueError(
            f"mla_decode_fwd: kv_buffer has strides {kv_buffer.stride()}, the kernels read a token's dims one after "
            "another: pass kv_buffer.contiguous()"
        )


def check_scales(q: torch.Tensor, kv_buffer: torch.Tensor, q_scale: object, kv_scale: object) -> None:
    """Raises RuntimeError for a missing scale, TypeError or ValueError for one that is not a float32 number."""
    needed = {"q_scale": q_scale} if q.dtype == dtypes.fp8 else {}
    needed |= {"kv_scale": kv_scale} if kv_buffer.dtype == dtypes.fp8 else {}
    for name, scale in needed.items():
        if scale is None:
            what = "fp8 q needs both q_scale and kv_scale" if len(needed) > 1 else "an fp8 cache needs kv_scale"
            raise RuntimeError(
                f"mla_decode_fwd: {what}; {name} is None, and the kernel would read through a pointer never set"
            )
    need_tensors("mla_decode_fwd", **needed)
    need_device("mla_decode_fwd", q.device, **needed)
    for name, scale in needed.items():
        if scale.dtype != torch.float32:
            raise TypeError(f"mla_decode_fwd: {name} is {scale.dtype}, the kernels read a raw float32: pass a float32")
        if scale.numel() != 1:
            raise ValueError(
                f"mla_decode_fwd: {name} has shape {tuple(scale.shape)}, expected (1,): the kernels take its first "
                "number for the whole tensor"
            )


def check_sm_scale(sm_scale: float) -> None:
    """Raises ValueError unless it is a positive, finite number."""
    if not 0 < sm_scale < torch.inf:
        raise ValueError(
            f"mla_decode_fwd: sm_scale is {sm_scale}, expected a positive finite number: the kernels multiply a "
            "running maximum that starts at −∞ by it, and give NaN otherwise; put a sign into q"
        )


def check_output(o: torch.Tensor, whole: bool) -> None:
    """Raises TypeError or ValueError for an `o` that cannot be written. whole: a kernel writes it as contiguous
    bfloat16, whatever it is, and not only a reduce that knows its dtype and strides."""
    written = (dtypes.bf16,) if whole else (dtypes.bf16, dtypes.fp16, dtypes.fp32)
    if o.dtype not in written:
        raise TypeError(f"mla_decode_fwd: o is {o.dtype}, this kernel writes {', '.join(map(str, written))}")
    if not o.is_contiguous() if whole else o.stride(2) != 1:
        raise ValueError(
            f"mla_decode_fwd: o has strides {o.stride()}, this kernel writes "
            f"{'a contiguous tensor' if whole else 'the dims of a head one after another'}: pass a contiguous one"
        )


def check_bounds(where: str, name: str, bounds: Sequence[int]) -> None:
    """Raises ValueError unless an indptr's values start at 0 or more and never fall."""
    if bounds[0] < 0:
        raise ValueError(f"{where}: {name} starts at {bounds[0]}, expected 0 or more")
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise ValueError(f"{where}: {name} falls from {start} at {i} to {end}, expected values that never fall")


def check_query_rows(where: str, name: str, bounds: Sequence[int]) -> None:
    """Raises ValueError unless sequence b has row b of q, or is one of the last, without a row."""
    for b, start in enumerate(bounds):
        if start != min(b, bounds[-1]):
            raise ValueError(
                f"{where}: {name}[{b}] is {start}, expected {min(b, bounds[-1])}: the 16-head kernels take row b of q "
                "for sequence b whatever it says, so each sequence needs one row, and those without may only come "
                "last; leave such sequences out of the batch"
            )


def check_entries(kv_bounds: Sequence[int], kv_indices: torch.Tensor) -> None:
    """Raises ValueError where kv_indptr ends behind kv_indices."""
    if kv_bounds[-1] > kv_indices.shape[0]:
        raise ValueError(
            f"mla_decode_fwd: kv_indptr ends at {kv_bounds[-1]}, kv_indices has {kv_indices.shape[0]} entries: the "
            "kernels would take what lies behind it for page numbers; pass one entry per page"
        )


def check_last_pages(lens: Sequence[int], page_size: int) -> None:
    """Raises ValueError for a last page without tokens, or with more than fit in a page."""
    for b, length in enumerate(lens):
        if not 1 <= length <= page_size:
            raise ValueError(
                f"mla_decode_fwd: kv_last_page_lens[{b}] is {length}, expected 1 to page_size {page_size} tokens"
            )


def check_rows(q: torch.Tensor, o: torch.Tensor, needed: int) -> None:
    """Raises ValueError where q or o has fewer rows than the batch needs."""
    for name, rows in {"q": q.shape[0], "o": o.shape[0]}.items():
        if rows < needed:
            raise ValueError(
                f"mla_decode_fwd: {name} has {rows} rows, qo_indptr and kv_indptr speak of {needed} sequences with a "
                f"query or tokens: the kernels would run past the end of {name}; pass one row per sequence"
            )


def check_pages(kv_buffer: torch.Tensor, lowest: int, highest: int) -> None:
    """Raises ValueError for a page that kv_buffer does not have, or that the kernels' offsets do not reach."""
    pages, row_bytes = kv_buffer.shape[0], kv_buffer.shape[3] * kv_buffer.element_size()
    if lowest < 0 or highest >= pages:
        raise ValueError(
            f"mla_decode_fwd: kv_indices holds page {lowest if lowest < 0 else highest}, kv_buffer has pages 0 to "
            f"{pages - 1}: the kernels would read what lies outside it"
        )
    stride = kv_buffer.stride(0) * kv_buffer.element_size()
    if highest * stride + row_bytes > _CACHE_BYTES or max(highest, stride) >= _PAGE_NUMBERS:
        raise ValueError(
            f"mla_decode_fwd: page {highest}, {stride} bytes per page, lies past what the kernels address: offsets "
            "from the start of kv_buffer wrap at 4 GiB, page numbers and strides at 2^24. Split the batch over smaller "
            "caches, or keep the cache in a smaller format"
        )


def check_splits(num_kv_splits: int, bounds: Sequence[int], lengths: Sequence[int]) -> None:
    """Raises ValueError where the kernel deals tokens to other splits than the reduce merges.

    bounds: of num_kv_splits_indptr. lengths: entries of the sequences that have a query row.
    """
    for b, length in enumerate(lengths):
        tiles = -(-length // SPLIT_TILE)
        if min(num_kv_splits, tiles) != min(bounds[b + 1] - bounds[b], tiles):
            raise ValueError(
                f"mla_decode_fwd: num_kv_splits_indptr gives sequence {b} {bounds[b + 1] - bounds[b]} splits, "
                f"num_kv_splits is {num_kv_splits}: the kernel deals a sequence to num_kv_splits parts and the reduce "
                "merges as many as the indptr says, so it would lose tokens or take another sequence's; pass "
                "torch.arange(batch + 1) * num_kv_splits as int32"
            )


def check_split_count(num_kv_splits: object) -> None:
    """Raises TypeError or ValueError unless it is an int above 0."""
    if not isinstance(num_kv_splits, int):
        raise TypeError(f"mla_decode_fwd: num_kv_splits must be an int, got {_kind(num_kv_splits)}")
    if num_kv_splits < 1:
        raise ValueError(
            f"mla_decode_fwd: num_kv_splits is {num_kv_splits}, expected 1 or more; where an fp8 batch has more "
            "sequences than kv_indices has entries, aiter picks 0: give num_kv_splits and num_kv_splits_indptr"
        )


def check_lists(where: str, lists: dict[str, torch.Tensor | None], device: torch.device) -> None:
    """The six lists of get_mla_metadata_v1, pointers first, in get_mla_metadata_info_v1's order.

    Raises RuntimeError for a missing one, TypeError or ValueError for another dtype, shape or device.
    """
    if any(buffer is None for buffer in lists.values()):
        raise RuntimeError(f"{where}: a persistent call needs all six lists of get_mla_metadata_v1")
    (name, pointers), *others = lists.items()
    need_tensors(where, **{name: pointers})
    need_device(where, device, **{name: pointers})
    if pointers.dtype != torch.uint64 or pointers.shape != (2,):
        raise TypeError(f"{where}: {name} is {tuple(pointers.shape)} {pointers.dtype}, expected (2,) torch.uint64")
    need_int32(where, device, **dict(others))
    for (name, tensor), width in zip(others, (0, 8, 0, 2, 0), strict=True):
        if tensor.dim() != 1 + bool(width) or (width and tensor.shape[1] != width) or not tensor.shape[0]:
            raise ValueError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, expected {f'(n, {width})' if width else '(n,)'}: "
                "allocate it as get_mla_metadata_info_v1 says"
            )


_REMAKE = "; make the lists anew with get_mla_metadata_v1 for this batch"


def check_works(
    cu_works: Sequence[int], works: Sequence[Sequence[int]], batch: int, entries: int, rows: int, parts: int
) -> None:
    """Raises ValueError for a work that no list of this call's shape can hold.

    cu_works: work_indptr. works: rows of work_info_set. entries: of kv_indices. rows: of q and o. parts: partials.
    """
    check_bounds("mla_decode_fwd", "work_indptr", cu_works)
    if cu_works[-1] > len(works):
        raise ValueError(
            f"mla_decode_fwd: work_indptr ends at {cu_works[-1]}, work_info_set has {len(works)} rows{_REMAKE}"
        )
    for i in range(cu_works[0], cu_works[-1]):
        b, place, row, row_end, start, end = works[i][:6]
        if 0 <= b < batch and place < parts and 0 <= row < rows and row_end == row + 1 and 0 <= start < end <= entries:
            continue
        raise ValueError(
            f"mla_decode_fwd: work {i} of work_info_set takes query rows {row} to {row_end}, entries {start} to {end} "
            f"of sequence {b}, and part {place}; this call has {rows} rows, {entries} entries, {batch} sequences, "
            f"{parts} parts, and a work needs one row and an entry (without one it ends its compute unit){_REMAKE}"
        )


def check_reduce(
    spans: Sequence[int], final_map: Sequence[Sequence[int]], partial_map: Sequence[int], rows: int
) -> None:
    """Raises ValueError for a tile that merges parts, or writes a row, that do not exist.

    spans: reduce_indptr. rows: of o. A tile of one part or none is skipped.
    """
    for tile, (first, last) in enumerate(itertools.pairwise(spans)):
        if last - first < 2:
            continue
        if first < 0 or last > len(partial_map):
            raise ValueError(
                f"mla_decode_fwd: reduce_indptr gives tile {tile} parts {first} to {last}, reduce_partial_map has "
                f"{len(partial_map)}{_REMAKE}"
            )
        if tile >= len(final_map):
            raise ValueError(
                f"mla_decode_fwd: reduce_indptr speaks of tile {tile}, reduce_final_map has {len(final_map)}{_REMAKE}"
            )
        row, end = final_map[tile]
        if not 0 <= row < rows or end != row + 1:
            raise ValueError(
                f"mla_decode_fwd: reduce_final_map writes rows {row} to {end} for tile {tile}, one of {rows} was "
                f"expected{_REMAKE}"
            )
        for place in partial_map[first:last]:
            if not 0 <= place < len(partial_map):
                raise ValueError(
                    f"mla_decode_fwd: reduce_partial_map names part {place} for tile {tile}, there are "
                    f"{len(partial_map)}{_REMAKE}"
                )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
