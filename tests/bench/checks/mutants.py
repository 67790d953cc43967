"""Submissions wrong in one way each, as edits of one that is right, and the check of `mla verify` that must say so."""

from dataclasses import dataclass
from pathlib import Path

RIGHT = """\
#!POPCORN leaderboard amd-mixed-mla
#!POPCORN gpu MI355X
import torch

kept = {}


def custom_kernel(data):
    q, kv_data, qo_indptr, kv_indptr, config = data
    batch, length = config["batch_size"], config["kv_seq_len"]
    kv = kv_data["bf16"].float().view(batch, length, 576)
    keys, values = kv, kv[..., :512]
    scores = q.float() @ keys.transpose(1, 2) * config["sm_scale"]
    weights = torch.softmax(scores, -1)
    output = (weights @ values).to(torch.bfloat16)
    return output
"""

KV = '    kv = kv_data["bf16"].float().view(batch, length, 576)\n'
SOFTMAX = "    weights = torch.softmax(scores, -1)\n"
RETURN = "    return output\n"
# The same on q and cache in fp8: its precision has the widest gate.
RIGHT_IN_FP8 = RIGHT.replace(
    KV,
    "    q = q.to(torch.float8_e4m3fn).float()\n"
    '    kv = (kv_data["fp8"][0].float() * kv_data["fp8"][1]).view(batch, length, 576)\n',
)


@dataclass(frozen=True)
class Mutant:
    """old → new in `right`; caught_by: the check that must fail; says: part of its findings; on_gpu: run there."""

    old: str
    new: str
    caught_by: str
    says: str
    right: str = RIGHT
    on_gpu: bool = False

    def write(self, folder: Path) -> Path:
        assert self.right.count(self.old) == 1
        path = folder / "submission.py"
        path.write_text(self.right.replace(self.old, self.new), encoding="utf-8")
        return path


MUTANTS = {
    "reads one token a page of 8": Mutant(KV, KV + "    kv = kv[:, ::8]\n", "tokens", "one token a page of 8"),
    "reads one token a page of 2": Mutant(KV, KV + "    kv = kv[:, ::2]\n", "tokens", "one token a page of 2"),
    "drops the last tile": Mutant(KV, KV + "    kv = kv[:, :-64]\n", "tokens", "the last 64 tokens of each sequence"),
    "drops the rest after the last whole tile": Mutant(
        KV, KV + "    kv = kv[:, : length // 64 * 64]\n", "tokens", "the last 44 tokens of each sequence"
    ),
    "masks one token too many": Mutant(
        SOFTMAX, "    scores[..., -1] = -torch.inf\n" + SOFTMAX, "tokens", "the last token of each sequence"
    ),
    "starts at token 1": Mutant(KV, KV + "    kv = kv[:, 1:]\n", "tokens", "the first token of each sequence"),
    "skips a tile in the middle": Mutant(
        SOFTMAX, "    scores[..., 128:144] = -torch.inf\n" + SOFTMAX, "tokens", "tokens 128 … 143"
    ),
    "skips the last token of each tile": Mutant(
        SOFTMAX, "    scores[..., 31::32] = -torch.inf\n" + SOFTMAX, "tokens", "token 31 of every 32"
    ),
    "drops a token in the last sequence only": Mutant(
        SOFTMAX, "    scores[-1, :, 0] = -torch.inf\n" + SOFTMAX, "tokens", "position 0, which other sequences find"
    ),
    "returns zeros": Mutant(RETURN, "    return torch.zeros_like(output)\n", "exact", "gate A: off by 1"),
    "forgets the scale of the fp8 cache": Mutant(
        KV, '    kv = kv_data["fp8"][0].float().view(batch, length, 576)\n', "exact", "gate A"
    ),
    "takes the values from the wrong columns": Mutant("kv[..., :512]", "kv[..., 64:]", "exact", "gate A"),
    "forgets sm_scale": Mutant(' * config["sm_scale"]', "", "exact", "gate A"),
    "rounds more coarsely than fp8": Mutant(
        "(weights @ values)", "((weights * 16).round() / 16 @ values)", "exact", "gate A"
    ),
    "keeps its first output": Mutant(
        RETURN, "    return kept.setdefault((batch, length), output)\n", "fresh", "several outputs alive"
    ),
    "writes all outputs to one buffer": Mutant(
        RETURN,
        "    buffer = kept.setdefault((batch, length), torch.empty_like(output))\n    return buffer.copy_(output)\n",
        "fresh",
        "share their memory",
    ),
    "replays the tensors of its first call": Mutant(
        KV,
        "    kv_data = kept.setdefault((batch, length), kv_data)\n" + KV,
        "fresh",
        "several outputs alive",
    ),
    "recognises a tensor by its address": Mutant(
        RETURN,
        '    return kept.setdefault((kv_data["bf16"].data_ptr(), batch), output).clone()\n',
        "fresh",
        "in the same tensors",
    ),
    "keeps lengths by the total of tokens": Mutant(
        KV,
        "    first = torch.arange(batch)[:, None] * kept.setdefault(batch * length, length)\n"
        "    rows = (first + torch.arange(length)).clamp(max=batch * length - 1)\n"
        '    kv = kv_data["bf16"].float()[rows, 0]\n',
        "fresh",
        "after other shapes",
    ),
    "takes exp without the maximum": Mutant(
        SOFTMAX,
        "    weights = scores.exp()\n    weights = weights / weights.sum(-1, keepdim=True)\n",
        "hard",
        "NaN or infinity",
    ),
    "takes the maximum over all sequences": Mutant(
        SOFTMAX,
        "    weights = (scores - scores.max()).exp()\n    weights = weights / weights.sum(-1, keepdim=True)\n",
        "strays",
        "with the rows of other sequences",
    ),
    "reads a row too many, times zero": Mutant(
        RETURN,
        '    before = max(kv_data["bf16"].storage_offset() - 576, 0)\n'
        '    return output + torch.as_strided(kv_data["bf16"], (512,), (1,), before) * 0\n',
        "strays",
        "NaN in the rows before and after the cache",
    ),
    "takes the scales' padding for scales": Mutant(
        KV,
        "    from reference import dequantize_mxfp4\n"
        '    codes, scales = kv_data["mxfp4"]\n'
        "    scales = scales.view(torch.uint8).flatten()[: batch * length * 18].view(-1, 18)\n"
        "    kv = dequantize_mxfp4(codes, scales, (batch * length, 1, 576), torch.float32).view(batch, length, 576)\n",
        "strays",
        "NaN in the rows before and after the cache",
    ),
    "differs from call to call": Mutant(
        RETURN,
        "    return (output * (1 + 0.003 * torch.randn(output.shape))).to(output.dtype)\n",
        "deterministic",
        "differ by",
    ),
    "scales q in place": Mutant(
        "    scores = q.float()",
        "    q *= 2\n    q /= 2\n    q += 0.0078125\n    scores = q.float()",
        "inputs",
        "1 of the input",
    ),
    "adds to the config": Mutant(KV, KV + '    config["seen"] = True\n', "inputs", "config or kv_data was changed"),
    "raises on longer sequences": Mutant(
        KV, KV + '    if length > 300: raise RuntimeError("too long")\n', "exact", "raises RuntimeError: too long"
    ),
    "returns float32": Mutant(
        ".to(torch.bfloat16)", "", "exact", "(2, 16, 512) float32 on cpu, expected (2, 16, 512) bfloat16"
    ),
    "returns a pair": Mutant(RETURN, "    return output, weights\n", "exact", "returns tuple, expected a tensor"),
    "has no header": Mutant("#!POPCORN gpu MI355X\n", "", "upload", "'#!POPCORN gpu MI355X' is missing"),
    "names the forbidden word": Mutant("kept = {}", "kept = {}  # Up" + "Stream", "upload", "in line 5"),
    "imports what is not there": Mutant("import torch\n", "import torch, rich\n", "upload", "imports rich"),
    "keeps metadata whatever the device": Mutant(
        KV,
        "    rows = kept.setdefault((batch, length), torch.arange(batch * length, device=q.device))\n"
        "    rows = rows + q.new_zeros(1, dtype=torch.int64)\n"
        '    kv = kv_data["bf16"][rows].float().view(batch, length, 576)\n',
        "fresh",
        "after a call on",
    ),
    # The following were found by somebody who set out to get past the checks.
    "zeroes its input and returns zeros": Mutant(
        RETURN,
        '    kv_data["bf16"].zero_()\n    return torch.zeros_like(output)\n',
        "exact",
        "1 of the input tensors were written to",
    ),
    "keeps outputs by torch's version counters": Mutant(
        RETURN,
        '    key = tuple((t.data_ptr(), t._version, len(t)) for t in (q, kv_data["bf16"]))\n'
        "    return kept.setdefault(key, (output, data))[0].clone()\n",
        "fresh",
        "new values in the same tensors",
    ),
    "never writes one dim of one head": Mutant(
        RETURN,
        "    output[:, 5, 511] = 0\n" + RETURN,
        "tokens",
        "wrong values, for head 5",
        RIGHT_IN_FP8,
    ),
    "masks the last token for one head": Mutant(
        SOFTMAX, "    scores[:, 7, -1] = -torch.inf\n" + SOFTMAX, "tokens", "at position 299", RIGHT_IN_FP8
    ),
    "weighs a token at a split's edge too much": Mutant(
        SOFTMAX,
        "    scores[..., length // 2] += 0.25\n" + SOFTMAX,
        "tokens",
        "of two tokens with equal weight one counts more",
        RIGHT_IN_FP8,
    ),
    "masks a token at an inner split's edge": Mutant(
        SOFTMAX, "    scores[..., 3 * -(-length // 5)] = -torch.inf\n" + SOFTMAX, "tokens", "token 1"
    ),
    "is 2 % too large": Mutant(
        "(weights @ values)", "(weights @ values * 1.02)", "exact", "outputs are 1.0", RIGHT_IN_FP8
    ),
    "has a softmax scale 1.5 % too large": Mutant(
        "    weights = torch",
        "    scores = scores * 1.015\n    weights = torch",
        "exact",
        "scale is 1.01",
        RIGHT_IN_FP8,
    ),
    "starts its maximum at zero": Mutant(
        SOFTMAX,
        "    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()\n"
        "    weights = weights / weights.sum(-1, keepdim=True)\n",
        "hard",
        "all logits near −120",
    ),
    "reads past q": Mutant(
        RETURN,
        "    after = min(q.storage_offset() + q.numel(), q.untyped_storage().nbytes() // q.itemsize - 512)\n"
        "    return output + torch.as_strided(data[0], (512,), (1,), after) * 0\n",
        "strays",
        "NaN in the rows before and after the cache",
    ),
    "lacks a few tokens of one sequence for one head": Mutant(
        SOFTMAX, "    scores[-1, 5, 77:82] = -torch.inf\n" + SOFTMAX, "exact", "head 5 of sequence", RIGHT_IN_FP8
    ),
    "masks one token of one sequence for one head": Mutant(
        SOFTMAX,
        "    scores[-1, 5, 77] = -torch.inf\n" + SOFTMAX,
        "tokens",
        "1 tokens miscounted by one head, as token 77 of sequence",
        RIGHT_IN_FP8,
    ),
    "puts off its work": Mutant(
        RETURN, "    return output.as_subclass(type('Later', (torch.Tensor,), {}))\n", "exact", "returns Later"
    ),
    "looks at the sequence before, times zero": Mutant(
        RETURN, "    return output + 0 * kv.roll(1, 0)[:, 0, None, :512].to(output.dtype)\n", "strays", "rows of other"
    ),
    "writes its outputs to nine buffers in turn": Mutant(
        RETURN,
        "    ring = kept.setdefault((batch, length), [torch.empty_like(output) for _ in range(9)])\n"
        "    ring.append(ring.pop(0))\n"
        "    return ring[0].copy_(output)\n",
        "fresh",
        "of 64 outputs alive some share their memory",
    ),
    "keeps outputs by a sample of the values": Mutant(
        RETURN,
        "    seen = q[:, 0, ::7], kv[:, ::11, ::7]\n"
        "    key = batch, length, *(part.double().sum().item() for part in seen)\n"
        "    return kept.setdefault(key, output).clone()\n",
        "fresh",
        "one new row of the cache",
    ),
    "keeps lengths by the batch": Mutant(
        KV,
        "    first = torch.arange(batch)[:, None] * kept.setdefault(batch, length)\n"
        "    rows = (first + torch.arange(length)).clamp(max=batch * length - 1)\n"
        '    kv = kv_data["bf16"].float()[rows, 0]\n',
        "fresh",
        "after other shapes",
    ),
    "takes denormals for zeros": Mutant(
        '(kv_data["fp8"][0].float()',
        '(torch.where(kv_data["fp8"][0].float().abs() < 2**-6, 0, kv_data["fp8"][0].float())',
        "hard",
        "all values denormal in fp8",
        RIGHT_IN_FP8,
    ),
    "adds memory that nobody wrote, times zero": Mutant(
        RETURN, "    return output + torch.empty_like(output) * 0\n", "deterministic", "what unwritten memory holds"
    ),
    "swaps two queries in place": Mutant(
        RETURN, "    q[:2] = q[:2].flip(0)\n" + RETURN, "inputs", "1 of the input tensors were written to"
    ),
    "has half of its header below code": Mutant(
        "#!POPCORN gpu MI355X\nimport torch\n",
        "import torch\n#!POPCORN gpu MI355X\n",
        "upload",
        "'#!POPCORN gpu MI355X' is missing among the comments that the file begins with",
    ),
    "leaves its work to a queue of its own": Mutant(
        RETURN,
        "    late = torch.zeros_like(output)\n"
        "    torch.cuda.synchronize()\n"
        "    with torch.cuda.stream(torch.cuda.Stream()):\n"
        "        torch.cuda._sleep(200_000_000)\n"
        "        late.copy_(output)\n"
        "    return late\n",
        "fresh",
        "still written to",
        on_gpu=True,
    ),
}
