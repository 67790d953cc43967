"""mxfp4 helpers, exhaustively."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.portable.calls import aiter

quant = aiter.fp4_utils


def test_all_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    values = quant.mxfp4_to_f32(codes[:, None]).numpy()
    expected = oracle.mxfp4_values(np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, 1), np.full((256, 1), 127))
    assert np.array_equal(values, expected[:, :2])
    assert np.array_equal(np.signbit(values), np.stack([np.arange(256) & 8, np.arange(256) >> 4 & 8], -1) > 0)


def test_all_scales():
    scales = quant.e8m0_to_f32(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)).double().numpy()
    assert np.isnan(scales[255])
    assert np.array_equal(scales[:255], 2.0 ** (np.arange(255) - 127.0))


def test_every_bfloat16_as_the_largest_of_its_block():
    """All magnitudes, NaN's too, in one place of a block that is zero otherwise; codes for those that are numbers."""
    block = torch.zeros(1 << 15, 32, dtype=torch.bfloat16)
    block[:, 5] = -torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16)
    codes, scales = (t.view(torch.uint8).numpy() for t in quant.dynamic_mxfp4_quant(block))
    with np.errstate(invalid="ignore"):
        nibbles, scale_bytes = oracle.mxfp4_quantise(block.float().numpy())
    assert np.array_equal(scales, scale_bytes)
    numbers = slice(0, 0x7F81)
    assert np.array_equal(np.stack([codes & 15, codes >> 4], -1).reshape(-1, 32)[numbers], nibbles[numbers])


@pytest.mark.parametrize(
    ("largest", "byte"),
    [(1.74 * 2.0**127, 252), (1.75 * 2.0**127, 254), (3.38e38, 254), (torch.inf, 254), (1.75 * 2.0**126, 252)],
)
def test_scale_bytes_at_the_top_of_the_range(largest, byte):
    """By hand: log2 − 2, rounded up from a mantissa of 1.75 on; past float32's top that is infinity, clamped to 127."""
    block = torch.ones(1, 32)
    block[0, 31] = largest
    assert quant.dynamic_mxfp4_quant(block)[1].view(torch.uint8).item() == byte


def test_quantiser_refusals():
    with pytest.raises(ValueError, match="columns a multiple of 32"):
        quant.dynamic_mxfp4_quant(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="floating point"):
        quant.dynamic_mxfp4_quant(torch.zeros(2, 64, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="shuffle=False"):
        quant.dynamic_mxfp4_quant(torch.zeros(2, 64), shuffle=True)
