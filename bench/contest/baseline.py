"""Split-KV decode in Triton on the bf16 cache: what a first attempt reaches, for `mla compare`.

One program per split of a sequence loads each tile of tokens once, for keys and values alike; a second kernel merges
the splits.
"""

import torch
import triton
import triton.language as tl

from reference import NUM_HEADS, V_HEAD_DIM

BLOCK = 64  # tokens per tile
_LOG2_E = 1.4426950408889634


@triton.jit
def _decode_kernel(q_ptr, kv_ptr, kv_indptr, partial_ptr, lse_ptr, scale, BLOCK: tl.constexpr, COMPUTE: tl.constexpr):
    """Program (s, b): attention over split s of sequence b, normalised, with its log2-sum-exp2, −inf without tokens."""
    split, batch, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    first = tl.load(kv_indptr + batch).to(tl.int64)
    end = tl.load(kv_indptr + batch + 1).to(tl.int64)
    share = tl.cdiv(tl.cdiv(end - first, splits), BLOCK) * BLOCK
    begin = first + split * share
    end = tl.minimum(begin + share, end)
    heads, dims, rope_dims = tl.arange(0, 16), tl.arange(0, 512), 512 + tl.arange(0, 64)
    q_rows = q_ptr + batch * 9216 + heads[:, None] * 576
    q = tl.load(q_rows + dims[None, :]).to(COMPUTE)
    q_rope = tl.load(q_rows + rope_dims[None, :]).to(COMPUTE)
    peak = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, 512], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < end
        rows = kv_ptr + tokens[:, None] * 576
        kv = tl.load(rows + dims[None, :], mask=inside[:, None], other=0.0).to(COMPUTE)
        rope = tl.load(rows + rope_dims[None, :], mask=inside[:, None], other=0.0).to(COMPUTE)
        scores = (tl.dot(q, kv.T) + tl.dot(q_rope, rope.T)) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        kept = tl.exp2(peak - new_peak)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(COMPUTE), kv)
        peak = new_peak
    part = (batch.to(tl.int64) * splits + split) * 16
    sums = tl.where(total[:, None] > 0, sums / total[:, None], 0.0)
    tl.store(partial_ptr + (part + heads[:, None]) * 512 + dims[None, :], sums)
    tl.store(lse_ptr + part + heads, tl.where(total > 0, peak + tl.log2(total), float("-inf")))


@triton.jit
def _merge_kernel(partial_ptr, lse_ptr, out_ptr, splits, PARTS: tl.constexpr):
    """Program (h, b): the splits of head h of sequence b, weighted by their lse; zeros where none had tokens."""
    head, batch = tl.program_id(0), tl.program_id(1)
    parts, dims = tl.arange(0, PARTS), tl.arange(0, 512)
    rows = (batch.to(tl.int64) * splits + parts) * 16 + head
    lse = tl.load(lse_ptr + rows, mask=parts < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    values = tl.load(partial_ptr + rows[:, None] * 512 + dims[None, :], mask=(parts < splits)[:, None], other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (batch.to(tl.int64) * 16 + head) * 512 + dims, merged.to(out_ptr.dtype.element_ty))


def splits_for(batch_size: int, kv_seq_len: int, processors: int) -> int:
    """As many splits as fill the machine once, each of one tile or more. A processor runs one program at a time, whose
    tiles fill its shared memory."""
    return max(1, min(processors // batch_size, -(-kv_seq_len // BLOCK)))


def decode(q: torch.Tensor, kv: torch.Tensor, kv_indptr: torch.Tensor, sm_scale: float, splits: int) -> torch.Tensor:
    """Attention of q (batch, 16, 576) over kv (total_kv, 1, 576), both bfloat16, in `splits` parts per sequence.

    kv_indptr (batch + 1,) int32, read on the device; a sequence without tokens gives zeros. Returns (batch, 16, 512)
    bfloat16.
    """
    batch = q.shape[0]
    partial = q.new_empty((batch, splits, NUM_HEADS, V_HEAD_DIM), dtype=torch.float32)
    lse = q.new_empty((batch, splits, NUM_HEADS), dtype=torch.float32)
    output = q.new_empty((batch, NUM_HEADS, V_HEAD_DIM))
    compute = tl.bfloat16 if q.is_cuda else tl.float32  # Triton's interpreter computes bfloat16 products wrongly
    _decode_kernel[(splits, batch)](
        q, kv, kv_indptr, partial, lse, sm_scale * _LOG2_E, BLOCK, compute, num_warps=4, num_stages=3
    )
    _merge_kernel[(NUM_HEADS, batch)](partial, lse, output, splits, triton.next_power_of_2(splits), num_warps=4)
    return output
