"""The switches of the portable aiter, and what its entry points share: how they read lists on the host."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class Settings:
    """How the portable aiter behaves.

    num_cus: compute units that splits and work lists are made for; 256 is an MI355X. Environment:
    PORTABLE_AITER_NUM_CUS.
    documented_paging: False reads the first token of each page, as the shipped gfx950 kernels do; True reads whole
    pages, as aiter's documentation says. Environment: PORTABLE_AITER_DOCUMENTED_PAGING=1.
    """

    num_cus: int = 256
    documented_paging: bool = False

    @contextlib.contextmanager
    def using(self, **changes: int | bool) -> Iterator[None]:
        """Apply `changes` inside a with block. Raises AttributeError for a name that is not a setting."""
        for name in changes:
            getattr(self, name)
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            yield
        finally:
            vars(self).update(before)


settings = Settings(
    num_cus=int(os.environ.get("PORTABLE_AITER_NUM_CUS", "256")),
    documented_paging=os.environ.get("PORTABLE_AITER_DOCUMENTED_PAGING", "0") == "1",
)


@contextlib.contextmanager
def host_reads(device: torch.device) -> Iterator[None]:
    """Let the block read device tensors on the host.

    The real library never synchronises; this one must read indptrs and work lists. Suspending CUDA's sync debug mode
    here keeps that mode meaningful for the caller: what it then reports is the caller's own doing.

    Raises RuntimeError while a CUDA graph is captured: a graph cannot hold what is decided on the host.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the portable aiter cannot be captured in a graph, it reads its lists on the host; AMD's aiter can"
        )
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


def host_lists(*tensors: torch.Tensor) -> list[list[int]]:
    """The values of int32 tensors of one device, flattened, in a single read."""
    values = torch.cat([tensor.flatten() for tensor in tensors]).tolist()
    lists, start = [], 0
    for tensor in tensors:
        lists.append(values[start : start + tensor.numel()])
        start += tensor.numel()
    return lists
