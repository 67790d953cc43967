"""What mla_decode_fwd refuses: it says what was wrong, and has written nothing by then."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.portable.calls import BF16, FP8, KERNELS, Call, Kind, aiter


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "persistent"),
    [(BF16, FP8, False), (FP8, BF16, False), (FP8, BF16, True), (torch.float16, torch.float16, False)],
)
def test_combinations_without_a_kernel(q_dtype, kv_dtype, persistent):
    call = Call([300], Kind(q_dtype, kv_dtype, persistent, 0), splits=1)
    with pytest.raises(RuntimeError, match="no gfx950 kernel"):
        call.run()
    assert torch.isnan(call.output).all()


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _elsewhere(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def _stored_as(*dims: int):
    """The same values and shape, with two dimensions swapped in memory."""
    return lambda t: t.transpose(*dims).contiguous().transpose(*dims)


# What is replaced (an attribute of Call, or an option) by what, or by what function of it; and the error's words. The
# call is two sequences of 300 and 200 tokens in two splits. A name starts with the kernel.
RUNTIME_ERRORS = {
    "fp8: q_scale missing": ({"q_scale": None}, "needs both q_scale and kv_scale; q_scale is None"),
    "fp8: kv_scale missing": ({"kv_scale": None}, "needs both q_scale and kv_scale; kv_scale is None"),
    "a16w8: kv_scale missing": ({"kv_scale": None}, "an fp8 cache needs kv_scale; kv_scale is None"),
    "fp8: two kv heads": ({"nhead_kv": 2}, "nhead_kv 2"),
    "fp8: a page size that is not the cache's": ({"page_size": 2}, "kv_buffer must be"),
    "bf16: q transposed": ({"q": _stored_as(1, 2)}, "q must be contiguous"),
    "bf16: q narrower than the cache": ({"q": lambda t: t[..., :512].contiguous()}, "q has 512 dims, kv_buffer 576"),
}
OUT_OF_SCOPE = {
    "bf16: eight heads": ({"q": lambda t: t[:, :8].contiguous()}, "16 heads"),
    "bf16: two query tokens": ({"max_seqlen_q": 2}, "max_seqlen_q 2"),
    "bf16: o of half the width": ({"output": lambda t: t[..., :256]}, r"o \(2, 16, 256\)"),
}
TYPE_ERRORS = {
    "bf16: last page lengths missing": ({"last_page_lens": None}, "kv_last_page_lens must be a tensor, got None"),
    "bf16: kv_indptr a list": ({"kv_indptr": [0, 300, 500]}, "kv_indptr must be a tensor, got a list"),
    "bf16: kv_indices int64": ({"kv_indices": torch.Tensor.long}, "kv_indices is torch.int64, the kernels read int32"),
    "bf16: kv_indptr int64": ({"kv_indptr": torch.Tensor.long}, r"pass kv_indptr.to\(torch.int32\)"),
    "a16w8: qo_indptr int64": ({"qo_indptr": torch.Tensor.long}, "qo_indptr is torch.int64"),
    "fp8: last page lengths int64": ({"last_page_lens": torch.Tensor.long}, "kv_last_page_lens is torch.int64"),
    "bf16: splits int64": ({"num_kv_splits_indptr": torch.Tensor.long}, "num_kv_splits_indptr is torch.int64"),
    "bf16: o int32": ({"output": torch.Tensor.int}, "o is torch.int32, this kernel writes torch.bfloat16, torch.fl"),
    "a16w8: o float32": ({"output": torch.Tensor.float}, "o is torch.float32, this kernel writes torch.bfloat16$"),
    "fp8: o float32, one split": (
        {"num_kv_splits": 1, "output": torch.Tensor.float},
        "o is torch.float32, this kernel writes torch.bfloat16$",
    ),
    "a8w8: q_scale bfloat16": ({"q_scale": torch.ones(1).bfloat16()}, "q_scale is torch.bfloat16"),
    "a16w8: kv_scale a number": ({"kv_scale": 0.5}, "kv_scale must be a tensor, got a float"),
    "bf16: half a split": ({"num_kv_splits": 0.5}, "num_kv_splits must be an int, got a float"),
}
VALUE_ERRORS = {
    # Where and how it lies in memory.
    "bf16: kv_indices strided": ({"kv_indices": lambda t: t.repeat_interleave(2)[::2]}, r"pass kv_indices.contiguous"),
    "bf16: kv_indices elsewhere": ({"kv_indices": _elsewhere}, "kv_indices is on meta, the other tensors on cpu"),
    "bf16: o elsewhere": ({"output": _elsewhere}, "o is on meta, the other tensors on cpu"),
    "a16w8: kv_scale elsewhere": ({"kv_scale": _elsewhere}, "kv_scale is on meta"),
    "a16w8: rows of o apart": ({"output": _stored_as(0, 1)}, "this kernel writes a contiguous tensor"),
    "bf16: dims of o apart": ({"output": _stored_as(1, 2)}, "the dims of a head one after another"),
    "bf16: dims of the cache apart": ({"kv": lambda t: t.T.contiguous().T[:, None, None]}, "kv_buffer has strides"),
    # Scales.
    "a16w8: a scale per token": ({"kv_scale": torch.ones(500)}, r"kv_scale has shape \(500,\), expected \(1,\)"),
    "fp8: a scale per head": ({"q_scale": torch.ones(1, 16, 1)}, r"q_scale has shape \(1, 16, 1\)"),
    "bf16: sm_scale 0": ({"sm_scale": 0.0}, "sm_scale is 0.0, expected a positive finite number"),
    "a16w8: sm_scale negative": ({"sm_scale": -1 / 24}, "put a sign into q"),
    "fp8: sm_scale NaN": ({"sm_scale": float("nan")}, "sm_scale is nan"),
    # Layouts.
    "bf16: an empty batch": ({"qo_indptr": _int32(0)}, "for one sequence or more"),
    "bf16: kv_indptr short": ({"kv_indptr": lambda t: t[:2]}, r"kv_indptr has shape \(2,\), expected \(3,\)"),
    "bf16: too few last page lengths": ({"last_page_lens": lambda t: t[:1]}, "kv_last_page_lens has shape"),
    "bf16: kv_indices two-dimensional": ({"kv_indices": lambda t: t[None]}, "kv_indices has shape"),
    "bf16: kv_indices short": ({"kv_indices": lambda t: t[:-1]}, "ends at 500, kv_indices has 499 entries"),
    "a16w8: kv_indices short": ({"kv_indices": lambda t: t[:-1]}, "ends at 500, kv_indices has 499 entries"),
    "bf16: kv_indptr before 0": ({"kv_indptr": _int32(-3, 300, 500)}, "kv_indptr starts at -3"),
    "bf16: a negative length": ({"kv_indptr": _int32(0, 300, 200)}, "falls from 300 at 1 to 200"),
    "bf16: page -1": ({"kv_indices": lambda t: t.where(t != 7, -1)}, "page -1, kv_buffer has pages 0 to 499"),
    "a8w8: page 500 of 500": ({"kv_indices": lambda t: t.where(t != 7, 500)}, "page 500, kv_buffer has pages 0 to 499"),
    "bf16: rows from 1 on": ({"qo_indptr": _int32(1, 2, 3)}, r"qo_indptr\[0\] is 1, expected 0"),
    "bf16: no row for sequence 0": ({"qo_indptr": _int32(0, 0, 1)}, r"qo_indptr\[1\] is 0, expected 1"),
    "a16w8: no row for sequence 0": ({"qo_indptr": _int32(0, 0, 1)}, "take row b of q for sequence b"),
    "fp8: two rows for sequence 0": ({"qo_indptr": _int32(0, 2, 3)}, r"qo_indptr\[1\] is 2, expected 1"),
    "bf16: too few rows of q": ({"q": lambda t: t[:1]}, "q has 1 rows, .* 2 sequences"),
    "fp8: too few rows of o": ({"output": lambda t: t[:1]}, "o has 1 rows"),
    "a16w8: too few rows of q": ({"q": lambda t: t[:1]}, "this call has 1 rows"),
    # Splits.
    "bf16: no splits": ({"num_kv_splits": 0}, "num_kv_splits is 0, expected 1 or more"),
    "fp8: splits below 0": ({"num_kv_splits": -1}, "num_kv_splits is -1, expected 1 or more"),
    "bf16: fewer splits than dealt": ({"num_kv_splits_indptr": _int32(0, 1, 3)}, "sequence 0 1 splits, .* is 2"),
    "bf16: more splits than dealt": ({"num_kv_splits_indptr": _int32(0, 2, 5)}, "gives sequence 1 3 splits"),
    "fp8: num_kv_splits_indptr short": ({"num_kv_splits_indptr": _int32(0, 2)}, "num_kv_splits_indptr has shape"),
}
REFUSALS = {
    name: (*case, error)
    for table, error in (
        (RUNTIME_ERRORS, RuntimeError),
        (OUT_OF_SCOPE, NotImplementedError),
        (TYPE_ERRORS, TypeError),
        (VALUE_ERRORS, ValueError),
    )
    for name, case in table.items()
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    changes, message, error = REFUSALS[name]
    call = Call([300, 200], name.partition(":")[0], splits=2)
    call.options["num_kv_splits_indptr"] = _int32(0, 2, 4)
    output, options = call.output, {}
    for what, change in changes.items():
        attribute = what not in call.options and hasattr(call, what) and what != "page_size"
        value = change(getattr(call, what) if attribute else call.options[what]) if callable(change) else change
        if attribute:
            setattr(call, what, value)
        else:
            options[what] = value
    with pytest.raises(error, match=message):
        call.run(**options)
    assert torch.isnan(output).all()


def test_logit_cap_is_refused_as_the_real_one_does():
    with pytest.raises(AssertionError, match="logit_cap"):
        Call([300], "bf16").run(logit_cap=1.0)


def test_a_batch_may_name_more_splits_than_it_has_tiles():
    call = Call([300, 70], "bf16", splits=8)
    call.run(num_kv_splits_indptr=_int32(0, 5, 7))
    assert call.error() < KERNELS["bf16"].budget


def test_an_fp8_batch_of_fewer_entries_than_sequences():
    """aiter's rule makes that 0 splits."""
    with pytest.raises(ValueError, match=r"num_kv_splits is 0.*aiter picks 0"):
        Call([0, 1], "fp8").run()


@pytest.mark.parametrize(("dtype", "page_bytes"), [(BF16, 1152), (FP8, 576)])
def test_pages_past_4_gib_are_refused(dtype, page_bytes):
    """The kernels' offsets are 32 bits wide, their page numbers and strides 24."""
    last = (2**32 - 16 - page_bytes) // page_bytes
    cache = torch.empty(last + 2, 1, 1, 576, dtype=dtype, device="meta")
    aiter.checks.check_pages(cache, 0, last)
    with pytest.raises(ValueError, match=rf"page {last + 1}, {page_bytes} bytes per page, lies past .* wrap at 4 GiB"):
        aiter.checks.check_pages(cache, 0, last + 1)
    far_apart = torch.empty(2, 1 << 24, dtype=dtype, device="meta")[:, None, None, :576]
    with pytest.raises(ValueError, match="strides at 2"):
        aiter.checks.check_pages(far_apart, 0, 1)


@settings(max_examples=80, deadline=None)
@given(
    kernel=st.sampled_from(["bf16", "fp8", "a16w8"]),
    name=st.sampled_from(["qo_indptr", "kv_indptr", "kv_indices", "num_kv_splits_indptr"]),
    place=st.integers(0, 1 << 20),
    value=st.one_of(st.integers(-3, 520), st.integers(-(2**31), 2**31 - 1)),
)
@example(kernel="bf16", name="qo_indptr", place=2, value=1)
@example(kernel="fp8", name="kv_indptr", place=2, value=300)
def test_one_wrong_number_is_refused_or_means_what_it_says(kernel, name, place, value):
    call = Call([300, 200], kernel, splits=2)
    call.options["num_kv_splits_indptr"] = _int32(0, 2, 4)
    changed = call.options[name] if name in call.options else getattr(call, name)
    changed[place % len(changed)] = value
    try:
        call.run()
    except ValueError:
        assert torch.isnan(call.output).all()
        return
    if kernel == "a16w8" and name == "kv_indptr":
        call.kv_indptr = _int32(0, 300, 500)  # the work lists say which entries are read
    bounds, indices = call.kv_indptr.tolist(), call.kv_indices.numpy()
    q, kv = call.read()
    for b, row in enumerate(call.qo_indptr.tolist()[1:]):
        tokens = kv[indices[bounds[b] : bounds[b + 1]]]
        if row == b + 1 and len(tokens):
            assert oracle.error(call.output[b], oracle.attention(q[b], tokens, 1 / 24)) < KERNELS[kernel].budget
        elif kernel != "a16w8":
            assert torch.isnan(call.output[b]).all()
