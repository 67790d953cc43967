#!POPCORN leaderboard amd-mixed-mla
#!POPCORN gpu MI355X
"""MLA decode for amd-mixed-mla that attends to every token of the cache.

custom_kernel(data) checks its input on the host, looks up the Plan for (batch_size, kv_seq_len) in a static table, and
lets that plan's Runner write a fresh output. From top to bottom: plans and tables, the entry point, the lookup, the
runners on aiter, our own kernel and its runner, the checks, what is kept between calls.

The file is uploaded alone: besides torch it needs only task.py and, depending on the plan, AMD's aiter or Triton, which
the server has.
"""

import abc
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from task import input_t, output_t

try:
    import triton
    import triton.language as tl
except ImportError:  # the runners on aiter do without
    triton = tl = None

NUM_HEADS = 16
QK_HEAD_DIM = 576
V_HEAD_DIM = 512
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

# ---- Plans and tables ----


@dataclass(frozen=True)
class Tile:
    """What else a kernel of our own is told: the cache it reads ("bf16", "fp8" or "mxfp4"), tokens a tile, warps per
    program, tiles in flight, and who merges several splits: the "last" program of a sequence, or a second "kernel"."""

    cache: str
    block: int = 64
    warps: int = 4
    stages: int = 3
    merge: str = "last"


@dataclass(frozen=True)
class Plan:
    """How one shape runs.

    runner: a key of RUNNERS. num_splits: parts a sequence is cut into, None where aiter picks them. page_size: cache
    rows per page; above 1 the shipped gfx950 kernels read only the first token of each page, see AiterRunner. tile: for
    the runners of our own kernels.
    """

    runner: str
    num_splits: int | None = None
    page_size: int = 1
    tile: Tile | None = None

    def __post_init__(self) -> None:
        if type(self.page_size) is not int or (self.num_splits is not None and type(self.num_splits) is not int):
            raise TypeError(f"page_size must be an int and num_splits an int or None: {self}")
        if self.tile is not None and not isinstance(self.tile, Tile):
            raise TypeError(f"tile must be a Tile or None: {self}")

    @property
    def precision(self) -> str:
        """What is read and rounded, as reference.PRECISIONS names it (a16w8: bf16 q, fp8 cache)."""
        return runner_of(self).precision(self)


Table = dict[tuple[int, int], Plan]  # keyed (batch_size, kv_seq_len)

# The fastest runner of each benchmark shape that reads the whole cache, by timings published for an MI355X (µs; we have
# measured none there):
#                              4/1k  4/8k  32/1k  32/8k  64/1k  64/8k  256/1k  256/8k
#     bf16 everywhere          20.2  34.5  28.5   108    39.3   157    110     462
#     fp8 non-persistent       25.5  37.1  36.7   84.2   47.3   137    121     320
#     a16w8/a8w8 persistent    26.5  37.6  31.0   82.7   39.7   136    87.3    312
# At 64/1024 the figures disagree: the author of v50 measured fp8 non-persistent at 40 against 50 for bf16, somebody
# else 47 against 39. At 256/8192 a16w8 was seen at 617 against 309–332 for a8w8: a16w8 suits 1024 tokens, a8w8 8192.
# The persistent splits are those that get_mla_metadata_v1 makes on 256 compute units; more would only grow buffers.
GFX950_TABLE: Table = {
    (4, 1024): Plan("bf16"),
    (4, 8192): Plan("bf16"),
    (32, 1024): Plan("bf16"),
    (32, 8192): Plan("a8w8_persistent", num_splits=8),
    (64, 1024): Plan("fp8_nonpersistent", num_splits=1),
    (64, 8192): Plan("a8w8_persistent", num_splits=4),
    (256, 1024): Plan("a16w8_persistent", num_splits=1),
    (256, 8192): Plan("a8w8_persistent", num_splits=1),
}

# The published design this project started from. Its page sizes read 1/2 and 1/8 of the cache: it is here to be
# compared with, runs only by choice and is never a default. Its author names no splits for kv 8192 above batch 32;
# those here are what get_mla_metadata_v1 makes at the most.
V50_TABLE: Table = {
    (4, 1024): Plan("bf16"),
    (4, 8192): Plan("a16w8_persistent", num_splits=16, page_size=8),
    (32, 1024): Plan("a16w8_persistent", num_splits=16, page_size=2),
    (32, 8192): Plan("a16w8_persistent", num_splits=8, page_size=8),
    (64, 1024): Plan("fp8_nonpersistent", num_splits=1),
    (64, 8192): Plan("a16w8_persistent", num_splits=4, page_size=8),
    (256, 1024): Plan("a16w8_persistent", num_splits=8, page_size=2),
    (256, 8192): Plan("a16w8_persistent", num_splits=1, page_size=8),
}

# Our own kernel on an MI355X: a candidate that nobody has timed there. About 256 programs, one per compute unit.
GFX950_FUSED_TABLE: Table = {
    (batch, length): Plan("fused", num_splits=max(1, min(256 // batch, length // 32)), tile=Tile("fp8", 32, 4, 2))
    for batch, length in GFX950_TABLE
}

# With the mxfp4 cache; pipelined, its code would spill scalar registers.
GFX950_FUSED_MXFP4_TABLE: Table = {
    shape: replace(plan, tile=replace(plan.tile, cache="mxfp4", stages=1)) for shape, plan in GFX950_FUSED_TABLE.items()
}

TABLES: dict[str, Table] = {
    "gfx950": GFX950_TABLE,
    "gfx950_fused": GFX950_FUSED_TABLE,
    "gfx950_fused_mxfp4": GFX950_FUSED_MXFP4_TABLE,
    "v50": V50_TABLE,
}
# By GPU architecture; one without a table of its own uses DEFAULT_TABLE.
TABLE_OF_ARCH = {"gfx950": "gfx950"}
DEFAULT_TABLE = "gfx950"

# ---- The entry point ----


class InputError(ValueError):
    """The data or the plan is not what the kernels take; the message says what was expected and what to do."""


class Problem(NamedTuple):
    """A checked input: what the runners work on. Shapes as in custom_kernel; kv_scale is the fp8 cache's."""

    q: torch.Tensor
    kv_bf16: torch.Tensor
    kv_fp8: torch.Tensor
    kv_scale: torch.Tensor
    kv_mxfp4: torch.Tensor
    kv_mxfp4_scales: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    batch_size: int
    kv_seq_len: int
    sm_scale: float


def custom_kernel(
    data: input_t, *, plan: Plan | None = None, strict: bool = False, kernels_honour_page_size: bool = False
) -> output_t:
    """Attention of one query token a sequence over all of its cache: a fresh (batch_size, 16, 512) bfloat16.

    data: (q, kv_data, qo_indptr, kv_indptr, config). q (batch_size, 16, 576) bfloat16; kv_data["bf16"] (total_kv, 1,
    576) bfloat16, kv_data["fp8"] the same in float8_e4m3fn with its (1,) float32 scale, kv_data["mxfp4"] (total_kv, 1,
    288) fp4x2 with its E8M0 scales; both indptrs (batch_size + 1,) int32; total_kv = batch_size × kv_seq_len. Lengths
    are uniform, as config states them: neither indptr is read on the host unless `strict`.

    plan: runs instead of the table's. strict: also checks that the indptrs are uniform, q in the plan's range and the
    output finite, which synchronises. kernels_honour_page_size: the caller's word that page_size above 1 reads whole
    pages on this platform.

    Two limits of the a8w8 runners: they cast q to fp8 with scale 1, so |q| ≤ 448, rounded to 3 mantissa bits; and AMD's
    kernels round exp(score − running maximum) to fp8, so that a token below 2^-10 of the largest weighs nothing.

    A graph may capture a call whose shape and plan have been called before; a first call, which makes what is kept, is
    refused. The graph holds the kept tensors' addresses, so it lives only as long as they do: until clear_caches(), or
    until as many other shapes have come by as are kept.

    Raises InputError (a ValueError) before any launch for data or a plan that the kernels do not take, RuntimeError
    without a usable aiter or Triton or when a first call is captured, and in strict mode FloatingPointError for an
    output with NaN or infinity.
    """
    problem = check_input(data)
    device = problem.q.device
    if plan is None:
        plan = plan_for(problem.batch_size, problem.kv_seq_len, device=device)
    elif not isinstance(plan, Plan):
        raise InputError(f"plan must be a Plan or None, got {type(plan).__name__}: {plan!r}")
    check_plan(plan, problem.kv_seq_len, kernels_honour_page_size)
    runner = runner_of(plan)
    runner.ready(device)
    if strict:
        _check_uniform(problem)
        _check_range(problem, plan)
    with _on_device_of(problem.q):
        output = torch.empty((problem.batch_size, NUM_HEADS, V_HEAD_DIM), dtype=torch.bfloat16, device=device)
        runner.run(problem, plan, output)
    if strict:
        _check_finite(output, plan)
    return output


def _on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU the current one: aiter sizes its lists for it and launches its reduce there."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


# ---- The lookup ----


@dataclass(frozen=True)
class Explanation:
    """What custom_kernel does with a shape.

    plan; why: the reason for it, a sentence; precision: what is read and rounded, see Plan; kernels: what a warm call
    launches at aiter's contest version, in order; partial_dtype: what splits leave their parts of the output in.
    """

    plan: Plan
    why: str
    precision: str
    kernels: tuple[str, ...]
    partial_dtype: torch.dtype


def plan_for(batch_size: int, kv_seq_len: int, *, table: str | None = None, device: torch.device | None = None) -> Plan:
    """The Plan for a shape from `table`, by default the table of the device's architecture.

    A shape that is no entry takes the runner of the nearest one: the least |log2(batch ratio)| + |log2(length ratio)|,
    ties to the smaller batch, then the shorter length. That runner makes its splits anew for the shape (Runner.fit), so
    the plan is always legal.

    Raises ValueError for an unknown table or a shape below 1, InputError for an entry that its runner cannot carry out.
    """
    return _find(batch_size, kv_seq_len, table or table_of(device))[0]


def explain(
    batch_size: int, kv_seq_len: int, *, table: str | None = None, device: torch.device | None = None
) -> Explanation:
    """The plan for a shape as plan_for finds it, with its reason, precision and launches. Raises as plan_for does."""
    plan, why = _find(batch_size, kv_seq_len, table or table_of(device))
    runner = runner_of(plan)
    return Explanation(plan, why, runner.precision(plan), runner.kernels(plan), runner.partial_dtype(plan))


def table_of(device: torch.device | None) -> str:
    """The name of the table for a device's architecture; of None and of a CPU, DEFAULT_TABLE."""
    return TABLE_OF_ARCH.get(_arch_of(device), DEFAULT_TABLE) if device and device.type == "cuda" else DEFAULT_TABLE


@functools.lru_cache(maxsize=64)
def _arch_of(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    # On CUDA, gcnArchName holds the GPU's name.
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


@functools.lru_cache(maxsize=256)
def _find(batch_size: int, kv_seq_len: int, table: str) -> tuple[Plan, str]:
    if table not in TABLES:
        raise ValueError(f"unknown table {table!r}, expected one of {', '.join(TABLES)}")
    if batch_size < 1 or kv_seq_len < 1:
        raise ValueError(f"batch_size and kv_seq_len must be 1 or more, got {batch_size} and {kv_seq_len}")
    entries = TABLES[table]
    if (batch_size, kv_seq_len) in entries:
        plan, why = entries[batch_size, kv_seq_len], f"entry ({batch_size}, {kv_seq_len}) of table {table}"
        check_plan(plan, kv_seq_len, kernels_honour_page_size=True)
        return plan, why

    def distance(entry: tuple[int, int]) -> tuple[float, int, int]:
        batch, length = entry
        return abs(math.log2(batch / batch_size)) + abs(math.log2(length / kv_seq_len)), batch, length

    nearest = min(entries, key=distance)
    plan = entries[nearest]
    check_plan(plan, nearest[1], kernels_honour_page_size=True)
    plan, note = runner_of(plan).fit(plan, nearest[0], batch_size, kv_seq_len)
    return plan, f"no entry in table {table}; runner of the nearest, {nearest}, {note}"


# ---- The runners on aiter ----


class Runner(abc.ABC):
    """How plans of one kind run. A new one is a subclass, and its line in RUNNERS."""

    @abc.abstractmethod
    def check(self, plan: Plan, kv_seq_len: int, kernels_honour_page_size: bool) -> None:
        """Refuse, with an InputError, a plan that cannot be carried out for this length."""

    @abc.abstractmethod
    def fit(self, plan: Plan, planned_batch: int, batch_size: int, kv_seq_len: int) -> tuple[Plan, str]:
        """`plan`, which is for `planned_batch` sequences, made legal for another shape; and how, in a few words."""

    @abc.abstractmethod
    def precision(self, plan: Plan) -> str:
        """What is read and rounded, a key of reference.PRECISIONS."""

    @abc.abstractmethod
    def kernels(self, plan: Plan) -> tuple[str, ...]:
        """What a warm call launches, in order."""

    def partial_dtype(self, plan: Plan) -> torch.dtype:
        """What splits leave their parts of the output in."""
        return torch.float32

    @abc.abstractmethod
    def ready(self, device: torch.device) -> None:
        """Raises RuntimeError, with what to do, where nothing can run on this device."""

    @abc.abstractmethod
    def run(self, problem: Problem, plan: Plan, output: torch.Tensor) -> None:
        """Write `output` (batch_size, 16, 512) bfloat16."""


def runner_of(plan: Plan) -> Runner:
    """Raises InputError for a plan whose runner is none."""
    if plan.runner not in RUNNERS:
        raise InputError(f"plan.runner {plan.runner!r} is unknown, expected one of {', '.join(RUNNERS)}")
    return RUNNERS[plan.runner]


# What get_mla_metadata_v1 does on gfx950 (aiter csrc/kernels/mla/metadata/v1_0_device.cuh).
NUM_CUS = 256
TOKENS_PER_SPLIT = 196
KV_GRANULARITY = 16
# A non-persistent kernel deals blocks of this many tokens over its splits; a split beyond the last block stays empty.
NONPERSISTENT_BLOCK = 64


@dataclass(frozen=True)
class AiterRunner(Runner):
    """aiter's mla_decode_fwd over the whole cache. reads: the precision; first, reduce: what is launched, by the names
    of aiter's contest version. a8w8 casts q to fp8 with scale 1."""

    reads: str
    first: tuple[str, ...]
    reduce: str

    def check(self, plan: Plan, kv_seq_len: int, kernels_honour_page_size: bool) -> None:
        """Pages of more than one token need a persistent kernel, and the caller's word for the platform's kernels."""
        page_size = plan.page_size
        if plan.tile is not None:
            raise InputError(f"plan.tile is for the fused runner and its like, {plan.runner} takes none: {plan}")
        if page_size < 1 or page_size & (page_size - 1) or kv_seq_len % page_size:
            raise InputError(
                f"plan.page_size must be a power of 2 that divides kv_seq_len {kv_seq_len}, got {page_size}"
            )
        if page_size > 1 and not isinstance(self, PersistentRunner):
            raise InputError(f"plan.page_size must be 1 for {plan.runner}, got {page_size}")
        if page_size > 1 and not kernels_honour_page_size:
            raise InputError(
                f"plan.page_size is {page_size}: aiter's gfx950 kernels overwrite it with 1 and read only the first "
                f"token of each page, 1/{page_size} of the cache (ROCm/aiter issues 200, 2996, 3095). Use page_size 1; "
                "if this platform's kernels are known to honour it, say so: "
                "custom_kernel(…, kernels_honour_page_size=True)"
            )
        self.check_splits(plan, kv_seq_len // page_size)

    @abc.abstractmethod
    def check_splits(self, plan: Plan, pages: int) -> None:
        """The part of `check` that is about plan.num_splits."""

    def precision(self, plan: Plan) -> str:
        return self.reads

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        return (*self.first, self.reduce)

    def ready(self, device: torch.device) -> None:
        _aiter()

    @abc.abstractmethod
    def options(self, problem: Problem, plan: Plan) -> dict[str, object]:
        """What mla_decode_fwd is told of the splits."""

    def run(self, problem: Problem, plan: Plan, output: torch.Tensor) -> None:
        options, device = self.options(problem, plan), problem.q.device
        q, cache = problem.q, problem.kv_bf16
        if self.reads != "a16w16":
            cache, options["kv_scale"] = problem.kv_fp8, problem.kv_scale
        if self.reads == "a8w8":
            q, options["q_scale"] = q.to(FP8), _unit_scale(device)
        page_size, pages = plan.page_size, problem.kv_seq_len // plan.page_size
        _aiter().mla.mla_decode_fwd(
            q,
            cache.view(-1, page_size, 1, QK_HEAD_DIM),
            output,
            problem.qo_indptr,
            problem.kv_indptr if page_size == 1 else _indptr(problem.batch_size, pages, device),
            _page_indices(problem.batch_size * pages, device),
            _last_page_lens(problem.batch_size, page_size, device),
            1,
            page_size=page_size,
            nhead_kv=1,
            sm_scale=problem.sm_scale,
            **options,
        )


class NonPersistentRunner(AiterRunner):
    """A grid of splits, then a reduce; of fp8, which needs to be told its splits, one writes the output itself."""

    def check_splits(self, plan: Plan, pages: int) -> None:
        most = _ceil_div(pages, NONPERSISTENT_BLOCK)
        if plan.num_splits is None and self.reads == "a8w8":
            raise InputError(f"plan.num_splits must be given for {plan.runner}")
        if plan.num_splits is not None and not 1 <= plan.num_splits <= most:
            raise InputError(
                f"plan.num_splits must be 1 … {most} for {plan.runner} at kv_seq_len {pages} (a tile of "
                f"{NONPERSISTENT_BLOCK} tokens a split), got {plan.num_splits}"
            )

    def fit(self, plan: Plan, planned_batch: int, batch_size: int, kv_seq_len: int) -> tuple[Plan, str]:
        if plan.num_splits is None:
            return plan, "aiter picks the splits"
        splits = min(plan.num_splits, _ceil_div(kv_seq_len, NONPERSISTENT_BLOCK))
        return replace(plan, num_splits=splits), "with at least a tile of tokens a split"

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        return self.first if self.reads == "a8w8" and plan.num_splits == 1 else super().kernels(plan)

    def options(self, problem: Problem, plan: Plan) -> dict[str, object]:
        if plan.num_splits is None:
            return {}
        indptr = _indptr(problem.batch_size, plan.num_splits, problem.q.device)
        return {"num_kv_splits": plan.num_splits, "num_kv_splits_indptr": indptr}


class PersistentRunner(AiterRunner):
    """A kernel that follows a work list of get_mla_metadata_v1, on the fp8 cache; then a reduce."""

    def check_splits(self, plan: Plan, pages: int) -> None:
        if pages < TOKENS_PER_SPLIT:
            raise InputError(
                f"{plan.runner} needs {TOKENS_PER_SPLIT} pages a sequence, got {pages}: get_mla_metadata_v1 makes "
                f"len // {TOKENS_PER_SPLIT} splits and divides by them. Use bf16 or fp8_nonpersistent"
            )
        most = _ceil_div(pages, KV_GRANULARITY)
        if plan.num_splits is None or not 1 <= plan.num_splits <= most:
            raise InputError(
                f"plan.num_splits must be 1 … {most} for {plan.runner} at {pages} pages (at least {KV_GRANULARITY} a "
                f"split), got {plan.num_splits}"
            )

    def fit(self, plan: Plan, planned_batch: int, batch_size: int, kv_seq_len: int) -> tuple[Plan, str]:
        page_size = math.gcd(plan.page_size, kv_seq_len)
        pages = kv_seq_len // page_size
        if pages < TOKENS_PER_SPLIT:
            return Plan("bf16"), f"replaced by bf16: {pages} pages are under {TOKENS_PER_SPLIT}"
        splits = persistent_splits(batch_size, pages)
        return Plan(plan.runner, splits, page_size), "with the splits that get_mla_metadata_v1 makes here"

    def options(self, problem: Problem, plan: Plan) -> dict[str, object]:
        lists = _work_lists(
            problem.batch_size,
            problem.kv_seq_len // plan.page_size,
            plan.num_splits,
            plan.page_size,
            FP8 if self.reads == "a8w8" else torch.bfloat16,
            problem.q.device,
        )
        return {"num_kv_splits": plan.num_splits, "intra_batch_mode": True, **lists}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def persistent_splits(batch_size: int, pages: int) -> int:
    """The splits that get_mla_metadata_v1 makes of each of `batch_size` sequences of `pages` ≥ 196 pages.

    The number returned, given back as num_kv_splits, is made again: no buffer is larger than what is used.
    """
    splits, cap = 0, min(pages // TOKENS_PER_SPLIT, _ceil_div(NUM_CUS, batch_size))
    while splits != cap:
        splits = cap
        payload = _ceil_div(_ceil_div(pages, KV_GRANULARITY), splits) * KV_GRANULARITY
        cap = _ceil_div(pages, payload)
        if cap > 1 and 1 <= pages % payload <= 4:  # the part before takes over a tail this short
            cap -= 1
    return splits


@functools.cache
def _aiter():
    """AMD's aiter, or whatever stands in its place on sys.path, once it is known to have what the runners call."""
    get = "On an MI355X install AMD's from https://github.com/ROCm/aiter; elsewhere run with PYTHONPATH=portable"
    try:
        import aiter
    except ImportError as error:
        raise RuntimeError(
            f"aiter is missing ({error}). {get}. `mla run` and pytest find the portable one by themselves"
        ) from error
    try:
        import aiter.mla

        passed = ["page_size", "num_kv_splits", "num_kv_splits_indptr", "work_meta_data"]
        passed += ["q_scale", "kv_scale", "intra_batch_mode"]
        parameters = inspect.signature(aiter.mla.mla_decode_fwd).parameters
        lacking = [name for name in passed if name not in parameters]
        lacking += [name for name in ("get_mla_metadata_info_v1", "get_mla_metadata_v1") if not hasattr(aiter, name)]
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"the aiter at {aiter.__file__} has no MLA decode ({error}); PyPI's package of that name is unrelated. "
            f"{get}"
        ) from error
    if lacking:
        raise RuntimeError(f"the aiter at {aiter.__file__} is too old, it lacks {', '.join(lacking)}. {get}")
    return aiter


# ---- Our own kernel: one Triton source for AMD, NVIDIA and Triton's interpreter ----
#
# Per head: qk, the scores of a tile's tokens, in base 2; m, the largest so far; p = 2^(qk − m), the tokens' weights; l,
# their sum; acc, the values' weighted sum; alpha = 2^(m − m_new), by which l and acc fade when m grows. What splits
# leave is acc / l and lse = m + log2(l). NaN stays: 0 × NaN is NaN, so it outlives whatever weight its part is given.
#
# LAYOUT: how the elements of a cache tile hold values: one each, two e4m3 in an int16, or four e2m1 in an int16.
# Element c of a row holds the dims groups × c, groups × c + 1, …; what is g-th in all elements makes up group g.
# Nothing is ever interleaved: each group has its own products and its own acc. Of a row, the first 512 dims are key and
# value; the 64 after them, rope, are key only.

_jit = triton.jit if triton else lambda function: function
constexpr = tl.constexpr if triton else None


@_jit
def _fp8_group(x, GROUP: constexpr, KEYS: constexpr, PTX: constexpr, COMPUTE: constexpr):
    """Group GROUP of a tile of fp8 pairs. On NVIDIA, where neighbours in a register are tokens, a byte of each of two
    elements is picked and converted with one instruction. Where they are dims (KEYS), the two bytes of one element are
    converted as they lie: group 0 then holds the dims 4j and 4j + 1, group 1 the others."""
    if PTX and KEYS:
        return tl.inline_asm_elementwise(
            f"{{.reg .b16 h0, h1; mov.b32 {{h0, h1}}, $1; cvt.rn.f16x2.e4m3x2 $0, h{GROUP};}}",
            "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX:
        return tl.inline_asm_elementwise(
            f"{{.reg .b16 h0, h1; .reg .b32 p; prmt.b32 p, $1, 0, {0x4420 + 0x11 * GROUP}; "
            f"mov.b32 {{h0, h1}}, p; cvt.rn.f16x2.e4m3x2 $0, h0;}}",
            "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # The 4 exponent bits of e4m3 (bias 7) are the low ones of float16's 5 (bias 15): 2^8 makes up for it.
        byte = (x.to(tl.int32) >> (8 * GROUP)) & 0xFF
        bits = tl.where(byte & 0x7F == 0x7F, 0x7E00, ((byte & 0x80) << 8) | ((byte & 0x7F) << 7))
        return (bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(COMPUTE)


@_jit
def _fp4_group(x, scale, GROUP: constexpr, PTX: constexpr, COMPUTE: constexpr):
    """Group GROUP of a tile of fp4 quads, times the scales. On NVIDIA two elements at a time: the 3 bits of size become
    the lowest exponent bits and the highest mantissa bit of a bfloat16, 2^126 makes up for the bias."""
    if PTX:
        return tl.inline_asm_elementwise(
            f"{{.reg .b32 n, m, s, u; shr.u32 n, $1, {4 * GROUP}; shl.b32 m, n, 6; and.b32 m, m, 0x01c001c0; "
            "shl.b32 s, n, 12; lop3.b32 m, s, 0x80008000, m, 0xea; "
            "mov.b32 u, 0x7e807e80; mul.rn.bf16x2 m, m, u; mul.rn.bf16x2 $0, m, $2;}",
            "=r,r,r", [x, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # e2m1 (bias 1) in the low exponent bits of float16 (bias 15): 2^14 makes up for it.
        nibble = (x.to(tl.int32) >> (4 * GROUP)) & 0xF
        bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
        return (bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * scale).to(COMPUTE)


@_jit
def _group(x, scale, GROUP: constexpr, LAYOUT: constexpr, KEYS: constexpr, PTX: constexpr, COMPUTE: constexpr):
    """Group GROUP of a tile (tokens, elements), in the type of the matrix products; transposed if KEYS."""
    if KEYS:
        x = x.T
    if LAYOUT == "fp8 pair":
        return _fp8_group(x, GROUP, KEYS, PTX, COMPUTE)
    elif LAYOUT == "fp4 quad":
        return _fp4_group(x, scale.T if KEYS else scale, GROUP, PTX, COMPUTE)
    else:
        return x.to(COMPUTE)


@_jit
def _block_scales(scales_ptr, rows, columns, inside, COMPUTE: constexpr):
    """2^(E8M0 code − 127) for each row and element, NaN for 255: 8 elements, 32 dims, share a code."""
    code = tl.load(scales_ptr + rows[:, None] + columns[None, :] // 8, mask=inside, other=127).to(tl.int32)
    # bfloat16 and float32 have E8M0's exponents; its least, 2^-127, is a denormal of theirs.
    scale = tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)
    return (scale * 0.0 + scale).to(COMPUTE)  # 255 is infinity there, and infinity × 0 is NaN


@_jit
def _store_groups(row_ptr, acc, factor, GROUPS: constexpr):
    """Write (16, 512) at row_ptr: dim GROUPS × c + g is column c of the g-th of acc, times its head's factor."""
    if GROUPS == 1:
        whole = acc[0]
    elif GROUPS == 2:
        whole = tl.reshape(tl.join(acc[0], acc[1]), [16, 512])
    else:
        whole = tl.reshape(tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3])), [16, 512])
    heads, dims = tl.arange(0, 16), tl.arange(0, 512)
    whole = whole * factor[:, None]
    tl.store(row_ptr + heads[:, None] * 512 + dims[None, :], whole.to(row_ptr.dtype.element_ty))


@_jit
def _merge_parts(partial_ptr, lse_ptr, out_ptr, batch, splits, cache_scale):
    """The parts of a sequence, weighted by 2^lse, into its output; zeros where no part had a token."""
    heads, dims = tl.arange(0, 16), tl.arange(0, 512)
    first = batch.to(tl.int64) * splits
    m = tl.full([16], float("-inf"), tl.float32)
    for split in tl.range(0, splits, num_stages=4):
        m = tl.maximum(m, tl.load(lse_ptr + (first + split) * 16 + heads))
    m = tl.where(m == float("-inf"), 0.0, m)
    l = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, 512], tl.float32)
    for split in tl.range(0, splits, num_stages=4):
        part = first + split
        p = tl.exp2(tl.load(lse_ptr + part * 16 + heads) - m)
        values = tl.load(partial_ptr + part * 8192 + heads[:, None] * 512 + dims[None, :])
        acc += values.to(tl.float32) * p[:, None]
        l += p
    factor = tl.where(l > 0, cache_scale / tl.maximum(l, 1e-37), 0.0)
    rows = out_ptr + batch.to(tl.int64) * 8192 + heads[:, None] * 512
    tl.store(rows + dims[None, :], (acc * factor[:, None]).to(out_ptr.dtype.element_ty))


@_jit
def _merge_kernel(
    partial_ptr, lse_ptr, scale_ptr, out_ptr, splits, PARTS: constexpr, SCALED: constexpr, PDL: constexpr
):
    """Program (h, b) merges the parts of head h of sequence b, PARTS of them at a time. A thread has the same dims of
    all parts: nothing is exchanged, and all loads are under way at once."""
    head, batch = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, 512)
    row = batch.to(tl.int64) * splits * 16 + head
    cache_scale = tl.load(scale_ptr) if SCALED else 1.0
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([512], tl.float32)
    for first in range(0, splits, PARTS):
        lses = ()
        values = ()
        m_new = m
        for part in tl.static_range(PARTS):
            # Beyond the last part it is read again, with no weight.
            at = row + tl.minimum(first + part, splits - 1) * 16
            lses = lses + (tl.where(first + part < splits, tl.load(lse_ptr + at), float("-inf")),)
            values = values + (tl.load(partial_ptr + at * 512 + dims),)
            m_new = tl.maximum(m_new, lses[part])
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        acc *= alpha
        l *= alpha
        for part in tl.static_range(PARTS):
            p = tl.exp2(lses[part] - base)
            acc += values[part].to(tl.float32) * p
            l += p
        m = m_new
    factor = tl.where(l > 0, cache_scale / tl.maximum(l, 1e-37), 0.0)
    tl.store(out_ptr + (batch.to(tl.int64) * 16 + head) * 512 + dims, (acc * factor).to(out_ptr.dtype.element_ty))


@_jit
def _load_query(q_ptr, first, columns, GROUP: constexpr, GROUPS: constexpr, PAIRED: constexpr):
    """The dims of q that group GROUP of a tile's elements `columns` meets, (16, columns) float32."""
    dims = columns // 2 * 4 + columns % 2 + 2 * GROUP if PAIRED else columns * GROUPS + GROUP
    return tl.load(q_ptr + tl.arange(0, 16)[:, None] * 576 + first + dims[None, :]).to(tl.float32)


@_jit
def _fused_kernel(
    q_ptr,
    cache_ptr,
    scale_ptr,
    kv_indptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    sm_scale,
    scale_row,
    tickets_ptr,
    LAYOUT: constexpr,
    SCALED: constexpr,
    BLOCK: constexpr,
    MERGE: constexpr,
    COMPUTE: constexpr,
    PTX: constexpr,
):
    """Program (s, b) attends to the s-th part of sequence b; with several parts it leaves a partial result and its lse.

    Each tile of tokens is loaded once and is key and value. MERGE: "none" for one part, which writes the output;
    "last": the program that takes the last ticket of its sequence merges; "kernel": _merge_kernel does.
    """
    split, batch, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    start, end = tl.load(kv_indptr + batch), tl.load(kv_indptr + batch + 1)
    per_split = tl.cdiv(tl.cdiv(end - start, splits), BLOCK) * BLOCK
    first = split * per_split
    count = tl.minimum(end - start - first, per_split)

    GROUPS: constexpr = 1 if LAYOUT == "one" else 2 if LAYOUT == "fp8 pair" else 4
    WIDTH: constexpr = 512 // GROUPS  # elements of a row that are key and value, then those that are key only
    ROPE: constexpr = 64 // GROUPS
    ROW: constexpr = WIDTH + ROPE
    PAIRED: constexpr = PTX and LAYOUT == "fp8 pair"
    NOTHING: constexpr = 0.0 if LAYOUT == "one" else 0
    tokens, columns, rope_columns = tl.arange(0, BLOCK), tl.arange(0, WIDTH), tl.arange(0, ROPE)

    q_row = q_ptr + batch.to(tl.int64) * (16 * 576)
    q_loaded = ()
    q_rope_loaded = ()
    top = tl.zeros([16], tl.float32)
    for g in tl.static_range(GROUPS):
        q_loaded = q_loaded + (_load_query(q_row, 0, columns, g, GROUPS, PAIRED),)
        q_rope_loaded = q_rope_loaded + (_load_query(q_row, 512, rope_columns, g, GROUPS, PAIRED),)
        top = tl.maximum(top, tl.maximum(tl.max(tl.abs(q_loaded[g]), 1), tl.max(tl.abs(q_rope_loaded[g]), 1)))
    # A power of two per head brings q into the range of float16.
    exponent = tl.floor(tl.log2(tl.maximum(top, 1e-30)))
    q = ()
    q_rope = ()
    for g in tl.static_range(GROUPS):
        q = q + ((q_loaded[g] * tl.exp2(-exponent)[:, None]).to(COMPUTE),)
        q_rope = q_rope + ((q_rope_loaded[g] * tl.exp2(-exponent)[:, None]).to(COMPUTE),)
    cache_scale = tl.load(scale_ptr) if SCALED else 1.0
    qk_scale = sm_scale * 1.4426950408889634 * cache_scale * tl.exp2(exponent)

    tile_ptr = cache_ptr + (start + first).to(tl.int64) * ROW
    offsets = tokens[:, None] * ROW + columns[None, :]
    rope_offsets = tokens[:, None] * ROW + WIDTH + rope_columns[None, :]
    scales_ptr = scale_ptr + (start + first).to(tl.int64) * scale_row
    m = tl.full([16], float("-inf"), tl.float32)
    l = tl.zeros([16, BLOCK], tl.float32)  # a column of tokens each, summed after the loop
    acc = ()
    for _ in tl.static_range(GROUPS):
        acc = acc + (tl.zeros([16, WIDTH], tl.float32),)

    for at in range(0, count, BLOCK):
        inside = (tokens < count - at)[:, None]
        kv = tl.load(tile_ptr + offsets, mask=inside, other=NOTHING)
        rope = tl.load(tile_ptr + rope_offsets, mask=inside, other=NOTHING)
        tile_ptr += BLOCK * ROW
        scales = 1.0
        rope_scales = 1.0
        if LAYOUT == "fp4 quad":
            scales = _block_scales(scales_ptr, tokens * scale_row, columns, inside, COMPUTE)
            rope_scales = _block_scales(scales_ptr + 16, tokens * scale_row, rope_columns, inside, COMPUTE)
            scales_ptr += BLOCK * scale_row
        # A product for each group and one for rope: chains that do not wait for each other.
        qk = tl.zeros([16, BLOCK], tl.float32)
        for g in tl.static_range(GROUPS):
            k = _group(kv, scales, g, LAYOUT, True, PTX, COMPUTE)
            k_rope = _group(rope, rope_scales, g, LAYOUT, True, PTX, COMPUTE)
            chain = tl.dot(q[g], k, input_precision="ieee")
            qk += tl.dot(q_rope[g], k_rope, chain, input_precision="ieee")
        qk = tl.where((tokens < count - at)[None, :], qk * qk_scale[:, None], float("-inf"))
        m_new = tl.maximum(m, tl.max(qk, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(qk - m_new[:, None])
        l = l * alpha[:, None] + p
        m = m_new
        p = p.to(COMPUTE)
        acc_new = ()
        for g in tl.static_range(GROUPS):
            v = _group(kv, scales, g, LAYOUT, False, PTX, COMPUTE)
            acc_new = acc_new + (tl.dot(p, v, acc[g] * alpha[:, None], input_precision="ieee"),)
        acc = acc_new

    if PTX and MERGE == "kernel":
        tl.extra.cuda.gdc_launch_dependents()
    l = tl.sum(l, 1)
    factor = tl.where(l > 0, 1.0 / tl.maximum(l, 1e-37), 0.0)
    if MERGE == "none":
        _store_groups(out_ptr + batch.to(tl.int64) * 8192, acc, factor * cache_scale, GROUPS)
    else:
        part = batch.to(tl.int64) * splits + split
        _store_groups(partial_ptr + part * 8192, acc, factor, GROUPS)
        lse = tl.where(l > 0, m + tl.log2(tl.maximum(l, 1e-37)), float("-inf"))
        tl.store(lse_ptr + part * 16 + tl.arange(0, 16), lse)
    if MERGE == "last":
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets_ptr + batch, 1, sem="acq_rel")
        if ticket == splits - 1:
            tl.store(tickets_ptr + batch, 0)
            _merge_parts(partial_ptr, lse_ptr, out_ptr, batch, splits, cache_scale)


# ---- The runner of our own kernel ----

FUSED_PRECISIONS = {"bf16": "a16w16", "fp8": "a16w8", "mxfp4": "a16w4"}  # by cache
MAX_FUSED_SPLITS = 128
_MERGED_AT_ONCE = 32  # parts


class Launch(NamedTuple):
    """One launch of a Triton kernel."""

    kernel: Callable
    grid: tuple[int, ...]
    arguments: dict[str, object]
    constants: dict[str, object]
    options: dict[str, int | bool]

    def start(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


class FusedRunner(Runner):
    """bf16 q on the cache that plan.tile names, each byte of it read once; ranges come from kv_indptr on the device.

    Two calls for the same batch size must not run at the same time on one device: they share the tickets. A subclass
    brings another first kernel: its name, what a Tile may hold for it, how it is launched, and where.
    """

    first_kernel = "_fused_kernel"
    choices: Mapping[str, tuple] = {
        "cache": tuple(FUSED_PRECISIONS),
        "block": (16, 32, 64, 128),
        "warps": (1, 2, 4, 8),
        "stages": (1, 2, 3, 4),
        "merge": ("last", "kernel"),
    }

    def check(self, plan: Plan, kv_seq_len: int, kernels_honour_page_size: bool) -> None:
        if plan.tile is None:
            raise InputError(f"plan.tile must be given for {plan.runner}: {plan}")
        if plan.page_size != 1:
            raise InputError(f"plan.page_size must be 1 for {plan.runner}, got {plan.page_size}")
        if plan.num_splits is None or not 1 <= plan.num_splits <= MAX_FUSED_SPLITS:
            raise InputError(f"plan.num_splits must be 1 … {MAX_FUSED_SPLITS} for {plan.runner}, got {plan.num_splits}")
        for name, allowed in self.choices.items():
            if getattr(plan.tile, name) not in allowed:
                raise InputError(
                    f"plan.tile.{name} must be one of {allowed} for {plan.runner}, got {getattr(plan.tile, name)!r}"
                )

    def fit(self, plan: Plan, planned_batch: int, batch_size: int, kv_seq_len: int) -> tuple[Plan, str]:
        most = min(_ceil_div(kv_seq_len, plan.tile.block), MAX_FUSED_SPLITS)
        splits = max(1, min(plan.num_splits * planned_batch // batch_size, most))
        return replace(plan, num_splits=splits), "with splits that make as many programs, of a tile or more each"

    def precision(self, plan: Plan) -> str:
        return FUSED_PRECISIONS[plan.tile.cache]

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        merged = plan.num_splits > 1 and plan.tile.merge == "kernel"
        return (self.first_kernel, "_merge_kernel") if merged else (self.first_kernel,)

    def partial_dtype(self, plan: Plan) -> torch.dtype:
        """float16 holds what is left of an fp8 cache before its scale is applied; the others have float32's range."""
        return torch.float16 if plan.tile.cache == "fp8" else torch.float32

    def target(self, device: torch.device) -> str:
        """What the kernels are compiled for: "nvidia", "amd", or "interpreter", where products are in float32.

        Raises RuntimeError where they cannot run.
        """
        if triton is None:
            raise RuntimeError("the fused runner needs Triton: pip install triton, or choose another plan")
        if device.type == "cuda":
            return "amd" if torch.version.hip else "nvidia"
        if isinstance(_fused_kernel, triton.JITFunction):
            raise RuntimeError(
                f"the fused runner is a Triton kernel and q is on {device}: use a GPU, or have it interpreted, by "
                "setting TRITON_INTERPRET=1 before the start"
            )
        return "interpreter"

    def ready(self, device: torch.device) -> None:
        self.target(device)

    def run(self, problem: Problem, plan: Plan, output: torch.Tensor) -> None:
        for launch in self.launches(problem, plan, output, self.target(problem.q.device)):
            launch.start()

    def launches(self, problem: Problem, plan: Plan, output: torch.Tensor, target: str) -> list[Launch]:
        """What is launched, in order, for sequences of any lengths, 0 included (their output is zeros): kv_indptr is
        read on the device alone, kv_seq_len not at all. Of the caches only the plan's is used. output (batch_size, 16,
        512) of any floating type; target as `target` gives it."""
        q, splits = problem.q, plan.num_splits
        cache, scale, scale_row = problem.kv_bf16, _unit_scale(q.device), 0
        if plan.tile.cache == "fp8":
            cache, scale = problem.kv_fp8, problem.kv_scale
            cache = cache if target == "amd" else cache.view(torch.int16)
        elif plan.tile.cache == "mxfp4":
            cache, scale = problem.kv_mxfp4.view(torch.uint8).view(torch.int16), problem.kv_mxfp4_scales
            scale, scale_row = scale.view(torch.uint8), scale.stride(0)
        parts = 0 if splits == 1 else problem.batch_size * splits * NUM_HEADS
        partial = q.new_empty(parts * V_HEAD_DIM, dtype=self.partial_dtype(plan))
        lse = q.new_empty(parts, dtype=torch.float32)
        shared = {
            "scale_ptr": scale,
            "kv_indptr": problem.kv_indptr,
            "partial_ptr": partial,
            "lse_ptr": lse,
            "out_ptr": output,
            "sm_scale": problem.sm_scale,
            "scale_row": scale_row,
        }
        decode = self.decode(problem, plan, target, cache, shared)
        if splits == 1 or plan.tile.merge != "kernel":
            return [decode]
        scaled, overlap = plan.tile.cache == "fp8", target == "nvidia"
        merge = Launch(
            _merge_kernel,
            (NUM_HEADS, problem.batch_size),
            {"partial_ptr": partial, "lse_ptr": lse, "scale_ptr": scale, "out_ptr": output, "splits": splits},
            {"PARTS": min(_MERGED_AT_ONCE, 1 << (splits - 1).bit_length()), "SCALED": scaled, "PDL": overlap},
            {"num_warps": 4} | ({"launch_pdl": True} if overlap else {}),
        )
        return [decode, merge]

    def decode(self, problem: Problem, plan: Plan, target: str, cache: torch.Tensor, shared: dict) -> Launch:
        """The first launch. cache: the plan's, where bytes are read in pairs as int16; shared: arguments by name."""
        tile, splits = plan.tile, plan.num_splits
        layout = "fp4 quad" if tile.cache == "mxfp4" else "fp8 pair" if cache.dtype == torch.int16 else "one"
        constants = {
            "LAYOUT": layout,
            "SCALED": tile.cache == "fp8",
            "BLOCK": tile.block,
            "MERGE": "none" if splits == 1 else tile.merge,
            "COMPUTE": tl.float32 if target == "interpreter" else tl.float16 if layout == "fp8 pair" else tl.bfloat16,
            "PTX": target == "nvidia",
        }
        tickets = _tickets(problem.batch_size, problem.q.device)
        arguments = {"q_ptr": problem.q, "cache_ptr": cache, **shared, "tickets_ptr": tickets}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return Launch(_fused_kernel, (splits, problem.batch_size), arguments, constants, options)


_CAST = "q cast to float8_e4m3fn"
RUNNERS: dict[str, Runner] = {
    "bf16": NonPersistentRunner("a16w16", ("mla_dec_stage1_bf16_a16w16_subQ16_mqa16",), "_fwd_kernel_stage2_asm"),
    "fp8_nonpersistent": NonPersistentRunner(
        "a8w8", (_CAST, "mla_a8w8_qh16_qseqlen1_gqaratio16"), "_fwd_kernel_stage2_asm"
    ),
    "a16w8_persistent": PersistentRunner("a16w8", ("mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps",), "kn_mla_reduce_v1"),
    "a8w8_persistent": PersistentRunner("a8w8", (_CAST, "mla_a8w8_qh16_qseqlen1_gqaratio16_ps"), "kn_mla_reduce_v1"),
    "fused": FusedRunner(),
}


# ---- The checks: on the host, before any launch ----

_CONFIG = {
    "num_heads": NUM_HEADS,
    "num_kv_heads": 1,
    "qk_head_dim": QK_HEAD_DIM,
    "kv_lora_rank": V_HEAD_DIM,
    "qk_rope_head_dim": QK_HEAD_DIM - V_HEAD_DIM,
    "v_head_dim": V_HEAD_DIM,
    "q_seq_len": 1,
}
_FORMATS = ("bf16", "fp8", "mxfp4")
_BF16, _FP8, _INT32, _FLOAT32 = (torch.bfloat16,), (FP8,), (torch.int32,), (torch.float32,)
_ROWS = ((QK_HEAD_DIM,), (QK_HEAD_DIM // 2,))  # how the shapes of q and the caches end
_FP4_DTYPES = (getattr(torch, "float4_e2m1fn_x2", torch.uint8), torch.uint8)
_E8M0_DTYPES = (getattr(torch, "float8_e8m0fnu", torch.uint8), torch.uint8)


def check_input(data: input_t) -> Problem:
    """Refuse, with an InputError, any data that is not the task's."""
    if not isinstance(data, tuple) or len(data) != 5:
        raise InputError("data must be the tuple (q, kv_data, qo_indptr, kv_indptr, config)")
    q, kv_data, qo_indptr, kv_indptr, config = data
    batch_size, kv_seq_len, sm_scale = _check_config(config)
    total_kv = batch_size * kv_seq_len
    if total_kv >= 2**31:
        raise InputError(
            f"batch_size × kv_seq_len is {total_kv}, more than the 32-bit indices of the kernels can count"
        )
    device = getattr(q, "device", None)
    _check_tensor("q", q, (batch_size, NUM_HEADS, QK_HEAD_DIM), _BF16, device)
    _check_tensor("qo_indptr", qo_indptr, (batch_size + 1,), _INT32, device)
    _check_tensor("kv_indptr", kv_indptr, (batch_size + 1,), _INT32, device)

    if not isinstance(kv_data, dict) or any(name not in kv_data for name in _FORMATS):
        found = ", ".join(map(repr, kv_data)) if isinstance(kv_data, dict) else type(kv_data).__name__
        raise InputError(f"kv_data must be a dict with 'bf16', 'fp8' and 'mxfp4', got {found}")
    _check_tensor("kv_data['bf16']", kv_data["bf16"], (total_kv, 1, QK_HEAD_DIM), _BF16, device)
    kv_fp8, kv_scale = _pair("fp8", kv_data["fp8"])
    _check_tensor("kv_data['fp8'][0]", kv_fp8, (total_kv, 1, QK_HEAD_DIM), _FP8, device)
    _check_tensor("kv_data['fp8'][1], the scale,", kv_scale, (1,), _FLOAT32, device)
    codes, scales = _pair("mxfp4", kv_data["mxfp4"])
    _check_tensor("kv_data['mxfp4'][0]", codes, (total_kv, 1, QK_HEAD_DIM // 2), _FP4_DTYPES, device)
    _check_mxfp4_scales(scales, total_kv, device)
    return Problem(
        q, kv_data["bf16"], kv_fp8, kv_scale, codes, scales, qo_indptr, kv_indptr, batch_size, kv_seq_len, sm_scale
    )  # fmt: skip


def _check_config(config: dict) -> tuple[int, int, float]:
    if not isinstance(config, dict):
        raise InputError(f"config must be a dict, got {type(config).__name__}")
    for name in ("batch_size", "kv_seq_len", "sm_scale", *_CONFIG):
        if name not in config:
            raise InputError(f"config lacks {name!r}")
    for name, value in _CONFIG.items():
        if config[name] != value:
            raise InputError(f"config[{name!r}] must be {value}, got {config[name]!r}")
    for name in ("batch_size", "kv_seq_len"):
        if type(config[name]) is not int or config[name] < 1:
            raise InputError(f"config[{name!r}] must be an int of 1 or more, got {config[name]!r}")
    sm_scale = config["sm_scale"]
    if not isinstance(sm_scale, float) or not math.isfinite(sm_scale):
        raise InputError(f"config['sm_scale'] must be a finite float, got {sm_scale!r}")
    return config["batch_size"], config["kv_seq_len"], sm_scale


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple, dtypes: tuple, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        old = (
            ", the fp8 of older GPUs (gfx942), which the gfx950 kernels misread" if "fnuz" in str(tensor.dtype) else ""
        )
        raise InputError(f"{name} must be {dtypes[0]}, got {tensor.dtype}{old}")
    if tensor.shape != shape:
        raise InputError(f"{name} must have shape {shape} for this config, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}, q on {device}: put all tensors on one device")
    if not tensor.is_contiguous():
        raise InputError(f"{name} is not contiguous: pass {name}.contiguous(), the kernels would read other rows")
    if shape[-1:] in _ROWS and tensor.data_ptr() % 16:
        raise InputError(f"{name} must start at a multiple of 16 bytes, as the kernels load it: pass {name}.clone()")


def _check_mxfp4_scales(scales: torch.Tensor, total_kv: int, device: torch.device) -> None:
    """Both of aiter's layouts are taken: (rows, 18), or padded in rows and columns."""
    name, blocks = "kv_data['mxfp4'][1], the scales,", QK_HEAD_DIM // 32
    shape = tuple(scales.shape) if isinstance(scales, torch.Tensor) else type(scales).__name__
    if len(shape) != 2 or isinstance(shape, str) or shape[0] < total_kv or shape[1] < blocks:
        raise InputError(f"{name} must have shape ({total_kv} or more, {blocks} or more), got {shape}")
    _check_tensor(name, scales, shape, _E8M0_DTYPES, device)


def _pair(name: str, entry: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(entry, (tuple, list)) or len(entry) != 2:
        raise InputError(f"kv_data[{name!r}] must be a pair (values, scale), got {type(entry).__name__}")
    return entry


@functools.lru_cache(maxsize=256)
def check_plan(plan: Plan, kv_seq_len: int, kernels_honour_page_size: bool = False) -> None:
    """Refuse, with an InputError, a plan that its runner cannot carry out for this length."""
    runner_of(plan).check(plan, kv_seq_len, kernels_honour_page_size)


def _check_uniform(problem: Problem) -> None:
    """Strict mode: the indptrs must be the uniform ones that the config states. Synchronises."""
    count = problem.batch_size + 1
    for name, length in ("qo_indptr", 1), ("kv_indptr", problem.kv_seq_len):
        if getattr(problem, name).tolist() != [i * length for i in range(count)]:
            raise InputError(
                f"{name} is not arange({count}) × {length} as config says: custom_kernel serves uniform lengths, its "
                "work lists are made from the config alone"
            )


def _check_range(problem: Problem, plan: Plan) -> None:
    """Strict mode: q must fit the cast that the plan makes. Synchronises."""
    if plan.precision == "a8w8" and bool((problem.q.abs() > FP8_MAX).any()):
        raise InputError(
            f"{plan.runner} casts q to fp8 with scale 1, which holds |q| ≤ {FP8_MAX:.0f}; this q goes beyond. Use bf16 "
            "or a16w8_persistent"
        )


def _check_finite(output: torch.Tensor, plan: Plan) -> None:
    """Strict mode: no NaN or infinity may come out. Synchronises."""
    bad = (~torch.isfinite(output)).flatten(1).any(1).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(f"{plan} gave NaN or infinity in {len(bad)} sequences, the first being {bad[0]}")


# ---- What is kept between calls: only what follows from shapes, device and plan; bounded ----

_KEPT = 32  # entries a cache; the largest index tensor of the benchmarks is 8 MB

# torch's question whether a graph is being captured, found by the end of its name: the server refuses the middle.
_graph_is_captured = next(getattr(torch.cuda, name) for name in dir(torch.cuda) if name.endswith("_capturing"))


def _keep(make: Callable) -> Callable:
    """Keep what `make` returns for its arguments, the last of which is the device.

    What is made while a graph is captured has no values until the graph is replayed: it is refused with a RuntimeError.
    """

    @functools.lru_cache(maxsize=_KEPT)
    @functools.wraps(make)
    def kept(*key):
        if key[-1].type == "cuda" and _graph_is_captured():
            raise RuntimeError(
                f"{make.__name__}{key} must be kept before a graph is captured: call custom_kernel once with this "
                "shape and plan, then capture"
            )
        return make(*key)

    return kept


@_keep
def _page_indices(pages: int, device: torch.device) -> torch.Tensor:
    return torch.arange(pages, dtype=torch.int32, device=device)


@_keep
def _indptr(batch_size: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (batch_size + 1) * length, length, dtype=torch.int32, device=device)


@_keep
def _last_page_lens(batch_size: int, page_size: int, device: torch.device) -> torch.Tensor:
    return torch.full((batch_size,), page_size, dtype=torch.int32, device=device)


@_keep
def _unit_scale(device: torch.device) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)


@_keep
def _work_lists(
    batch_size: int, pages: int, num_splits: int, page_size: int, q_dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The arguments that make mla_decode_fwd persistent on the fp8 cache, for uniform sequences of `pages` pages."""
    aiter, shared = _aiter(), {"fast_mode": False, "intra_batch_mode": True}
    info = aiter.get_mla_metadata_info_v1(
        batch_size, 1, NUM_HEADS, q_dtype, FP8, is_sparse=False, num_kv_splits=num_splits, **shared
    )  # fmt: skip
    names = [
        "work_meta_data",
        "work_indptr",
        "work_info_set",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
    ]
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in info]
    meta, work_indptr, work_info_set, *reduce = tensors
    aiter.get_mla_metadata_v1(
        _indptr(batch_size, 1, device),
        _indptr(batch_size, pages, device),
        _last_page_lens(batch_size, page_size, device),
        NUM_HEADS,
        1,
        True,
        *(meta, work_info_set, work_indptr, *reduce),  # work_info_set first here, and only here
        page_size=page_size,
        kv_granularity=KV_GRANULARITY,
        max_seqlen_qo=1,
        uni_seqlen_qo=1,
        max_split_per_batch=num_splits,
        dtype_q=q_dtype,
        dtype_kv=FP8,
        **shared,
    )
    return dict(zip(names, tensors, strict=True))


@_keep
def _tickets(batch_size: int, device: torch.device) -> torch.Tensor:
    """A counter for each sequence, by which the fused kernel finds its last program; every call leaves them at zero."""
    return torch.zeros(batch_size, dtype=torch.int32, device=device)


_CACHES = (_page_indices, _indptr, _last_page_lens, _unit_scale, _work_lists, _tickets)


def clear_caches() -> None:
    """Forget all kept tensors; the next call of each shape makes its own anew."""
    for cache in _CACHES:
        cache.cache_clear()
