"""A second opinion in numpy float64 and ml_dtypes, sharing no code with what it judges."""

import ml_dtypes
import numpy as np
import torch


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """Any of the task's tensors as float64 (codes and scales as uint8)."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).astype(np.float64)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if tensor.element_size() == 1:
        return tensor.contiguous().view(torch.uint8).numpy()
    return tensor.numpy().astype(np.float64)


def mxfp4_values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(rows, n) uint8 codes and (at least rows, at least n / 16) uint8 scales to (rows, 2n) float64."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    blocks = scales[: len(codes), : values.shape[1] // 32].astype(np.uint8)
    return values * np.repeat(blocks.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)


def mxfp4_quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, n) float32 to nibbles (rows, n) and scale bytes (rows, n / 32), by aiter's rule for the scale."""
    rows, columns = x.shape
    blocks = x.reshape(rows, columns // 32, 32).astype(np.float64)
    top = np.abs(x.reshape(rows, columns // 32, 32)).max(-1).astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((top + 0x200000) & 0xFF800000).astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(divide="ignore"):
        exponent = np.clip(np.floor(np.log2(rounded)) - 2, -127, 127)
    nibbles = (blocks * 2.0 ** -exponent[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return nibbles.reshape(rows, columns), (exponent + 127).astype(np.uint8)


def attention(q: np.ndarray, kv: np.ndarray, sm_scale: float) -> np.ndarray:
    """q (heads, 576), kv (tokens, 576): (heads, 512)."""
    scores = q @ kv.T * sm_scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ kv[:, :512] / weights.sum(-1, keepdims=True)


def error(output: torch.Tensor | np.ndarray, expected: np.ndarray) -> float:
    """Relative L2."""
    got = numpy_of(output) if isinstance(output, torch.Tensor) else output
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def work_lists(
    lengths: list[int], max_splits: int, num_cus: int, granularity: int = 16
) -> tuple[list[list[int]], list[int]]:
    """get_mla_metadata_v1's works and work_indptr, by labelling each token with its part and grouping the labels."""
    works, begin = [], 0
    for b, n in enumerate(lengths):
        splits = min(n // 196, int(np.ceil(num_cus / len(lengths))), max_splits)
        blocks = np.arange(n) // granularity
        label = blocks // int(np.ceil((blocks[-1] + 1) / splits))
        if label[-1] > 0 and (label == label[-1]).sum() <= 4:
            label[label == label[-1]] -= 1
        parts, starts, counts = np.unique(label, return_index=True, return_counts=True)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            place = len(works) if len(parts) > 1 else -1
            works.append([b, place, b, b + 1, begin + start, begin + start + count, n - start - count, 0])
        begin += n
    shares = np.array_split(np.arange(len(works)), num_cus)
    return works, [0, *np.cumsum([len(share) for share in shares]).tolist()]
