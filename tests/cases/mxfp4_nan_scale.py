"""A token whose last scale byte is 255, NaN by OCP MX 1.0: the fused kernel read it as infinity, so that the token's
scores were −inf, its weight 0, and the output finite.

Mended in the commit "The fused kernel reads the E8M0 code 255 as the NaN that it is".
"""

import torch

LENGTHS = [64, 3]
TOKEN, BLOCK = 40, 17  # of the first sequence; a block of the dims that are key only


def build() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (2, 16, 576) bfloat16; elements (67, 1, 288) and scales (67, 18), both uint8. All numbers are 1, but for the
    token's block, which is −1 × NaN. Expected: NaN for the first sequence, 1 for the second."""
    elements = torch.full((sum(LENGTHS), 1, 288), 0x22, dtype=torch.uint8)
    scales = torch.full((sum(LENGTHS), 18), 127, dtype=torch.uint8)
    elements[TOKEN, 0, BLOCK * 16 : (BLOCK + 1) * 16] = 0xAA
    scales[TOKEN, BLOCK] = 255
    return torch.ones(2, 16, 576, dtype=torch.bfloat16), elements, scales
