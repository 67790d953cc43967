"""What the gfx950 decode kernels compute: float32 torch, with each kernel's own rounding points.

Read from the code objects that aiter ships for 16 heads and one query token (contest pin f3be04a1, hsa/gfx950/mla).
Run instruction by instruction in an emulator, each agrees with `attend` to a relative L2 of 1e-5.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .settings import settings
from .utility import dtypes

NUM_HEADS = 16
KEY_DIMS = 576
VALUE_DIMS = 512  # the first of the key's
_CHUNK = 8192  # tokens dequantised at a time; a multiple of every kernel's tile


def _to_fp8(p: torch.Tensor) -> torch.Tensor:
    return p.to(dtypes.fp8).float()


def _to_bf16(p: torch.Tensor) -> torch.Tensor:
    """To the nearest bfloat16, halves away from zero: the kernels add 0x7fff and 1 to the bits and cut them off."""
    return ((p.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


@dataclass(frozen=True)
class Kernel:
    """One of the shipped kernels.

    tile: tokens between two updates of the running maximum. rounding: what happens to the unnormalised probabilities
    before the value product; their sum is never rounded.
    """

    tile: int
    rounding: Callable[[torch.Tensor], torch.Tensor]


# By the dtypes of q and the cache, and whether the kernel is persistent; there are no others.
KERNELS = {
    (dtypes.bf16, dtypes.bf16, False): Kernel(64, _to_bf16),
    (dtypes.fp8, dtypes.fp8, False): Kernel(64, _to_fp8),
    (dtypes.bf16, dtypes.bf16, True): Kernel(16, _to_bf16),
    (dtypes.bf16, dtypes.fp8, True): Kernel(16, _to_bf16),
    (dtypes.fp8, dtypes.fp8, True): Kernel(128, _to_fp8),
}


class Cache:
    """Which cache rows a range of kv_indices entries stands for, dequantised on demand.

    ends: the entry behind each sequence's last one. last_page_lens: tokens in its last page. scale: of an fp8 cache.
    """

    def __init__(
        self,
        kv_buffer: torch.Tensor,
        kv_indices: torch.Tensor,
        ends: list[int],
        last_page_lens: list[int],
        scale: torch.Tensor | None,
    ):
        self._page_size = kv_buffer.shape[1]
        self._whole_pages = self._page_size > 1 and settings.documented_paging
        self._indices = kv_indices.long()
        self._ends, self._last_page_lens = ends, last_page_lens
        # Bytes, not float8: indexing float8 is not implemented on every device.
        self._rows = kv_buffer[:, :, 0].view(torch.uint8) if kv_buffer.dtype == dtypes.fp8 else kv_buffer[:, :, 0]
        self._dtype = kv_buffer.dtype
        self._scale = scale

    def tokens(self, sequence: int, start: int, stop: int) -> torch.Tensor:
        """Rows (page × page_size + place) of entries start … stop, which belong to `sequence`; int64."""
        pages = self._indices[start:stop]
        if not self._whole_pages:
            return pages * self._page_size
        rows = (pages[:, None] * self._page_size + torch.arange(self._page_size, device=pages.device)).flatten()
        if stop < self._ends[sequence]:
            return rows
        return rows[: rows.shape[0] - self._page_size + self._last_page_lens[sequence]]

    def load(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, 576) float32 values of those rows, times the scale."""
        rows = self._rows[tokens // self._page_size, tokens % self._page_size].view(self._dtype).float()
        return rows if self._scale is None else rows * self._scale


def attend(
    q: torch.Tensor, cache: Cache, tokens: torch.Tensor, sm_scale: float, kernel: Kernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query (16, 576) over some tokens: (16, 512) float32 normalised, and its natural-log lse (16,).

    The kernels keep a running maximum per tile of tokens and round exp(score − running maximum); the row sum is not
    rounded.
    """
    top = q.new_full((NUM_HEADS,), -torch.inf)
    total = q.new_zeros(NUM_HEADS)
    out = q.new_zeros(NUM_HEADS, VALUE_DIMS)
    for part in tokens.split(_CHUNK):
        kv = cache.load(part)
        scores = q @ kv.T * sm_scale
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % kernel.tile), value=-torch.inf)
        tiles = padded.unflatten(1, (-1, kernel.tile))
        running = torch.cummax(torch.cat([top[:, None], tiles.amax(-1)], 1), 1).values[:, 1:]
        probabilities = torch.exp(tiles - running[..., None])
        new_top = running[:, -1]
        rescale = torch.exp(running - new_top[:, None])
        keep = torch.exp(top - new_top)
        total = total * keep + (probabilities.sum(-1) * rescale).sum(-1)
        weights = (kernel.rounding(probabilities) * rescale[..., None]).flatten(1)[:, : scores.shape[1]]
        out = out * keep[:, None] + weights @ kv[:, :VALUE_DIMS]
        top = new_top
    return out / total[:, None], top + torch.log(total)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts (n, 16, 512) and (n, 16) to the whole and its lse; no parts at all give NaN, as 0/0 does in the real
    reduce."""
    if not outs.shape[0]:
        return outs.new_full(outs.shape[1:], torch.nan), lses.new_full(lses.shape[1:], torch.nan)
    top = lses.amax(0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    return (outs * weights[..., None]).sum(0) / total[:, None], top + torch.log(total)


def workspace(*shape: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials (*shape, 16, 512) and their lse (*shape, 16), NaN until written."""
    partial = torch.full((*shape, NUM_HEADS, VALUE_DIMS), torch.nan, device=device)
    return partial, torch.full((*shape, NUM_HEADS), torch.nan, device=device)
