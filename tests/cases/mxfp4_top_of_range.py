"""A block whose largest element is 1.75 × 2^127 got the scale byte 253; aiter's rule rounds it up to infinity: 254.

Mended in the commit "mxfp4: a block whose largest element is 1.75 × 2^127 or more gets scale byte 254".
"""

import torch

SCALE_BYTE = 254


def build() -> torch.Tensor:
    """(1, 1, 32) bfloat16."""
    block = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    block[..., 31] = 1.75 * 2.0**127
    return block
