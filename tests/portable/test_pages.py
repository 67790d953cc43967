"""page_size above 1: as the shipped kernels read it, and as aiter documents it."""

import warnings

import pytest
import torch

from tests.portable.calls import KERNELS, Call, aiter


@pytest.mark.parametrize("page_size", [2, 8])
@pytest.mark.parametrize("kernel", ["a16w8", "a8w8", "bf16"])
def test_pages_give_their_first_token_only(kernel, page_size):
    call = Call([1600, 3200], kernel, splits=1, page_size=page_size)
    with pytest.warns(aiter.mla.PagingWarning, match=f"1/{page_size} of the cache") as caught:
        call.run()
    assert caught[0].filename.endswith("calls.py"), "it points at the call"
    assert call.error(slice(None, None, page_size)) < KERNELS[kernel].budget
    assert call.error() > 0.3


@pytest.mark.parametrize("kernel", ["a16w8", "bf16"])
def test_documented_paging_reads_whole_pages(kernel):
    call = Call([1601, 3207], kernel, splits=2, page_size=8)
    with aiter.settings.using(documented_paging=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        call.run()
    assert call.error() < KERNELS[kernel].budget
    assert not aiter.settings.documented_paging


@pytest.mark.parametrize("length", [0, 9, -1])
def test_documented_paging_needs_the_lengths_of_last_pages(length):
    call = Call([1601], "bf16", splits=2, page_size=8)
    call.last_page_lens[0] = length
    with (
        aiter.settings.using(documented_paging=True),
        pytest.raises(ValueError, match=rf"kv_last_page_lens\[0\] is {length}, expected 1 to page_size 8"),
    ):
        call.run()
    assert torch.isnan(call.output).all()


def test_page_size_one_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Call([30], "bf16").run()
