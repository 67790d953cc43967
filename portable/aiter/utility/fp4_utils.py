"""mxfp4: e2m1 values in pairs (low nibble first) with one E8M0 scale per 32 values.

The rounding is aiter's since 2026-03-18 (e6af9a487d): ties to the even code, scales of shape (rows, columns / 32).
"""

import torch

from . import dtypes

BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CHUNK_ROWS = 1024  # keeps the float32 temporaries of 576 columns in a CPU's cache


def dynamic_mxfp4_quant(
    x: torch.Tensor, scaling_mode: str = "even", shuffle: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to mxfp4.

    x: (rows, columns), floating point, columns a multiple of 32.
    Returns (rows, columns / 2) fp4x2 and (rows, columns / 32) fp8_e8m0, on x's device.
    A block with a NaN gets some finite values: neither the format nor aiter's rule has a place for it.
    Raises ValueError for another shape or dtype, NotImplementedError for another scaling mode or shuffled scales.
    """
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(f"x must be (rows, columns) with columns a multiple of {BLOCK}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got {x.dtype}")
    if scaling_mode != "even" or shuffle:
        raise NotImplementedError("the portable aiter has scaling_mode='even' and shuffle=False only")
    rows, columns = x.shape
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, columns // BLOCK), dtype=torch.uint8, device=x.device)
    for start in range(0, rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        _quantise(x[part], codes[part], scales[part])
    return codes.view(dtypes.fp4x2), scales.view(dtypes.fp8_e8m0)


def _quantise(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    blocks = x.float().unflatten(1, (-1, BLOCK))
    exponent = _block_exponent(blocks.abs().amax(-1))
    scales.copy_(exponent + 127)
    nibbles = _e2m1_codes(torch.ldexp(blocks, -exponent.unsqueeze(-1))).flatten(1)
    torch.bitwise_or(nibbles[:, 0::2], nibbles[:, 1::2] << 4, out=codes)


def _block_exponent(amax: torch.Tensor) -> torch.Tensor:
    """log2(amax) − 2, rounded down, but up from a mantissa of 1.75 on, and clamped to ±127; int32.

    Rounded up from 1.75 × 2^127 on, amax is infinite, which gives 127.
    """
    biased = (amax.contiguous().view(torch.int32) + 0x200000) >> 23 & 0xFF
    return (biased - (127 + 2) + (biased == 255)).clamp_(min=-127)


def _e2m1_codes(v: torch.Tensor) -> torch.Tensor:
    """Four-bit codes of float32 values, nearest with ties to the even code, saturating at ±6; uint8."""
    bits = v.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # From 1 up a code is the exponent and one mantissa bit: round the float's bits there. Below 1 codes count halves:
    # adding 2^22, whose unit in the last place is 1/2, rounds to them.
    odd = magnitude.bitwise_right_shift(22).bitwise_and_(1)
    above = odd.add_(magnitude).add_(0x1FFFFF).bitwise_right_shift_(22).sub_(2 * 126).clamp_(max=7)
    below = magnitude.view(torch.float32).add(2.0**22).view(torch.int32).bitwise_and_(3)
    code = torch.where(magnitude < 0x3F800000, below, above)
    return bits.bitwise_right_shift(28).bitwise_and_(8).bitwise_or_(code).to(torch.uint8)


def mxfp4_to_f32(x: torch.Tensor) -> torch.Tensor:
    """Values of packed codes, without scales: (..., n) fp4x2 or uint8 to (..., 2n) float32."""
    packed = x.view(torch.uint8)
    table = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), dtype=torch.float32, device=x.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)  # both values of each byte
    return pairs[packed.int()].flatten(-2)


def e8m0_to_f32(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte − 127) as float32, NaN for byte 255: same shape."""
    byte = scale.view(torch.uint8).int()
    value = torch.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is a float32 denormal
    return torch.where(byte == 255, 0x7FC00000, value).to(torch.int32).view(torch.float32)
