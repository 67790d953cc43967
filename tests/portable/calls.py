"""Calls of the portable aiter over ragged, shuffled and padded sequences, with float64 attention beside them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import reference  # noqa: F401 (chooses the aiter)
from tests import oracle

if torch.version.hip is not None:
    pytest.skip("AMD's own aiter is in use, not the portable one", allow_module_level=True)

import aiter

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LISTS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


@dataclass(frozen=True)
class Kind:
    """One of the gfx950 kernels, and how far from float64 it may be (relative L2)."""

    q: torch.dtype
    kv: torch.dtype
    persistent: bool
    budget: float


KERNELS = {
    "bf16": Kind(BF16, BF16, False, 0.004),
    "fp8": Kind(FP8, FP8, False, 0.03),
    "a16w16": Kind(BF16, BF16, True, 0.004),
    "a16w8": Kind(BF16, FP8, True, 0.004),
    "a8w8": Kind(FP8, FP8, True, 0.03),
}


def cast(values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """To fp8 by its scale, clamped: torch casts above 464 to NaN up to 2.11 and saturates in 2.13."""
    return (values / scale).clamp(-448, 448).to(dtype) if dtype == FP8 else values.to(dtype)


def indptr(counts: list[int], start: int = 0) -> torch.Tensor:
    return torch.tensor([start, *(start + np.cumsum(counts)).tolist()], dtype=torch.int32)


class Call:
    """One mla_decode_fwd call, with everything in reach.

    lengths: tokens per sequence. kind: a name in KERNELS, or a Kind. unqueried: how many sequences, the last ones, have
    no query row. spare_rows: rows of q and o that belong to no sequence. lead, spare: entries of kv_indices before the
    first sequence and after the last one, which name pages that are not there.
    """

    def __init__(
        self,
        lengths: list[int],
        kind: str | Kind,
        *,
        splits: int | None = None,
        page_size: int = 1,
        unqueried: int = 0,
        spare_rows: int = 0,
        lead: int = 0,
        spare: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        kind = KERNELS[kind] if isinstance(kind, str) else kind
        generator = torch.Generator().manual_seed(seed)
        self.kind, self.splits, self.lengths, self.page_size = kind, splits, lengths, page_size
        self.queried = len(lengths) - unqueried
        rows = self.queried + spare_rows
        pages = [-(-n // page_size) for n in lengths]
        self.q_values = torch.randn(rows, 16, 576, generator=generator).to(device)
        kv = torch.randn(max(sum(pages), 1) * page_size, 576, generator=generator).to(device)
        self.kv_scale = torch.tensor([0.0123], device=device) if kind.kv == FP8 else None
        self.q_scale = torch.tensor([0.0081], device=device) if kind.q == FP8 else None
        self.q = cast(self.q_values, kind.q, self.q_scale)
        self.kv = cast(kv, kind.kv, self.kv_scale)
        # Pages in random order, so that kv_indices matters.
        order = torch.randperm(sum(pages), generator=generator).to(torch.int32)
        nowhere = torch.tensor([-1, 2**31 - 1], dtype=torch.int32)
        self.kv_indices = torch.cat(
            [nowhere.repeat(lead)[:lead], order, nowhere.repeat(spare)[:spare]],
        ).to(device)
        self.kv_indptr = indptr(pages, start=lead).to(device)
        self.qo_indptr = indptr([1] * self.queried + [0] * unqueried).to(device)
        ends = [n - (p - 1) * page_size for n, p in zip(lengths, pages, strict=True)]
        self.last_page_lens = torch.tensor(ends, dtype=torch.int32, device=device)
        self.output = torch.full((rows, 16, 512), torch.nan, dtype=BF16, device=device)
        self.options = {"num_kv_splits": splits, "q_scale": self.q_scale, "kv_scale": self.kv_scale}
        if kind.persistent:
            self.options |= {"intra_batch_mode": True, **self.make_lists(splits)}

    def make_lists(self, splits: int, **changes) -> dict[str, torch.Tensor]:
        info = aiter.get_mla_metadata_info_v1(
            len(self.lengths), 1, 16, self.q.dtype, self.kv.dtype, is_sparse=False, fast_mode=False,
            num_kv_splits=splits, intra_batch_mode=True,
        )  # fmt: skip
        buffers = dict(zip(LISTS, (torch.empty(s, dtype=t, device=self.q.device) for s, t in info), strict=True))
        arguments = {
            "page_size": self.page_size, "kv_granularity": 16, "max_seqlen_qo": 1, "uni_seqlen_qo": 1,
            "fast_mode": False, "max_split_per_batch": splits, "intra_batch_mode": True, **changes,
        }  # fmt: skip
        aiter.get_mla_metadata_v1(
            self.qo_indptr, self.kv_indptr, self.last_page_lens, 16, 1, True, buffers["work_meta_data"],
            buffers["work_info_set"], buffers["work_indptr"], *(buffers[name] for name in LISTS[3:]), **arguments,
        )  # fmt: skip
        return buffers

    def run(self, **changes) -> tuple[torch.Tensor, torch.Tensor | None]:
        kv = self.kv.view(-1, self.page_size, 1, 576) if self.kv.dim() == 2 else self.kv
        return aiter.mla.mla_decode_fwd(
            self.q, kv, self.output, self.qo_indptr, self.kv_indptr, self.kv_indices, self.last_page_lens,
            **{"max_seqlen_q": 1, "page_size": self.page_size, **self.options, **changes},
        )  # fmt: skip

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """q and the cache (tokens, 576) in float64, as their formats hold them."""
        pairs = (self.q, self.q_scale), (self.kv, self.kv_scale)
        return tuple(oracle.numpy_of(values) * (1 if scale is None else scale.item()) for values, scale in pairs)

    def expected(self, tokens: slice = slice(None)) -> np.ndarray:
        """float64 attention of each sequence with a query row over its tokens[…], in the order of its pages."""
        q, kv = self.read()
        bounds, indices = self.kv_indptr.tolist(), self.kv_indices.cpu().numpy()
        whole = np.full((self.queried, 16, 512), np.nan)
        for b, n in enumerate(self.lengths[: self.queried]):
            if n:
                rows = kv.reshape(-1, self.page_size, 576)[indices[bounds[b] : bounds[b + 1]]].reshape(-1, 576)
                whole[b] = oracle.attention(q[b], rows[:n][tokens], 1 / 24)
        return whole

    def error(self, tokens: slice = slice(None)) -> float:
        """Relative L2 of the whole output."""
        return oracle.error(self.output[: self.queried], self.expected(tokens))
