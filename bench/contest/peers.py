"""Other people's MLA decode kernels on the task's data, and our baseline, for `mla compare`.

A peer is started once per shape, with what follows from lengths alone (schedules, workspaces, page tables). What that
returns is bound to each round's data outside the timed call (views of the cache, scales that it wants on the host). The
timed call then does all that depends on q, a cast included.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from bench.basics import unknown
from bench.environment import processors_of
from reference import FP8, NUM_HEADS, QK_HEAD_DIM, QK_ROPE_HEAD_DIM, V_HEAD_DIM
from task import input_t, output_t

Call = Callable[[input_t], output_t]
Bind = Callable[[input_t], Call]
Start = Callable[[input_t], Bind]

_PAGE = 64  # tokens; the only page size of FlashMLA
_WORKSPACE_BYTES = 128 << 20  # as FlashInfer recommends


@dataclass(frozen=True)
class Peer:
    """key: its name on the command line. precision: what it reads, a key of reference.PRECISIONS. module, package:
    what is imported, and the distribution it comes in. get: how to get it. build: compiles it before its first use, for
    those that compile at all."""

    key: str
    name: str
    precision: str
    module: str
    package: str
    get: str
    start: Start
    build: Callable[[], object] | None = None

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def choose(keys: Sequence[str]) -> list[Peer]:
    """The peers with those keys. Raises UserError for an unknown one."""
    known = {peer.key: peer for peer in PEERS}
    for key in keys:
        if key not in known:
            raise unknown("peer", key, known)
    return [known[key] for key in dict.fromkeys(keys)]


def build(peers: Sequence[Peer]) -> list[Peer]:
    """Compile, side by side, the peers that would compile when first used. In the place of one that fails comes a peer
    that raises the error when started: compiling it again for each shape would take as long each time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_built, peers))


def _built(peer: Peer) -> Peer:
    try:
        if peer.build:
            peer.build()
    except Exception as error:
        return replace(peer, start=functools.partial(_raise, error))
    return peer


def _raise(error: Exception, data: input_t) -> Bind:
    raise error


# ---- FlashMLA, as packaged by SGLang: its kernels for Hopper ----


def _flash_mla_pages(data: input_t) -> tuple[torch.Tensor, torch.Tensor]:
    """The page table (batch, pages) and the lengths (batch,), int32. Raises ValueError where sequences would end within
    a page."""
    config, device = data[4], data[0].device
    batch, length = config["batch_size"], config["kv_seq_len"]
    if length % _PAGE:
        raise ValueError(f"FlashMLA reads pages of {_PAGE} tokens: kv_seq_len must be a multiple, got {length}")
    table = torch.arange(batch * length // _PAGE, dtype=torch.int32, device=device).view(batch, -1)
    return table, torch.full((batch,), length, dtype=torch.int32, device=device)


def _start_flash_mla_bf16(data: input_t) -> Bind:
    import flash_mla

    table, lengths = _flash_mla_pages(data)
    schedule, _ = flash_mla.get_mla_metadata()  # filled in by the first call

    def bind(data: input_t) -> Call:
        cache = data[1]["bf16"].view(-1, _PAGE, 1, QK_HEAD_DIM)

        def call(data: input_t) -> output_t:
            output, _ = flash_mla.flash_mla_with_kvcache(
                data[0].unsqueeze(1), cache, table, lengths, V_HEAD_DIM, schedule,
                softmax_scale=data[4]["sm_scale"], is_fp8_kvcache=False, use_legacy=True,
            )  # fmt: skip
            return output.squeeze(1)

        return call

    return bind


def _start_flash_mla_fp8(data: input_t) -> Bind:
    import flash_mla

    table, lengths = _flash_mla_pages(data)
    schedule, _ = flash_mla.get_mla_metadata()
    schedule.tile_scheduler_metadata, schedule.num_splits = flash_mla.get_mla_decoding_metadata(
        lengths, NUM_HEADS, 1, is_fp8_kvcache=True, use_legacy=True
    )
    unit = torch.ones(1, dtype=torch.float32, device=data[0].device)

    def bind(data: input_t) -> Call:
        values, scale = data[1]["fp8"]
        cache = values.view(-1, _PAGE, 1, QK_HEAD_DIM)

        def call(data: input_t) -> output_t:
            output, _ = flash_mla.flash_mla_with_kvcache(
                data[0].to(FP8).unsqueeze(1), cache, table, lengths, V_HEAD_DIM, schedule,
                softmax_scale=data[4]["sm_scale"], is_fp8_kvcache=True, use_legacy=True,
                descale_q=unit, descale_k=scale,
            )  # fmt: skip
            return output.squeeze(1)

        return call

    return bind


# ---- FlashInfer: its FlashAttention-3 kernel, compiled by nvcc when first used ----


def _build_flashinfer(kv_dtype: torch.dtype) -> None:
    from flashinfer.jit import gen_batch_mla_module

    rope = QK_ROPE_HEAD_DIM
    gen_batch_mla_module("fa3", torch.bfloat16, kv_dtype, torch.bfloat16, torch.int32, V_HEAD_DIM, rope, False).build(
        need_lock=True
    )


def _start_flashinfer(data: input_t, cache: str) -> Bind:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    q, _, qo_indptr, kv_indptr, config = data
    batch, length = config["batch_size"], config["kv_seq_len"]
    page = _PAGE if length % _PAGE == 0 else 1
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=q.device), backend="fa3"
    )
    wrapper.plan(
        qo_indptr,
        kv_indptr // page,
        torch.arange(batch * length // page, dtype=torch.int32, device=q.device),
        torch.full((batch,), length, dtype=torch.int32, device=q.device),
        NUM_HEADS,
        V_HEAD_DIM,
        QK_ROPE_HEAD_DIM,
        page,
        False,  # causal
        config["sm_scale"],
        q.dtype,
        torch.bfloat16 if cache == "bf16" else FP8,
    )

    def bind(data: input_t) -> Call:
        scales = {}
        if cache == "bf16":
            values = data[1]["bf16"]
        else:
            values, scale = data[1]["fp8"]
            scales = dict.fromkeys(("ckv_scale", "kpe_scale"), scale.item())
        latent, rope = values.view(-1, page, QK_HEAD_DIM).split([V_HEAD_DIM, QK_ROPE_HEAD_DIM], dim=-1)

        def call(data: input_t) -> output_t:
            q = data[0]
            return wrapper.run(q[..., :V_HEAD_DIM], q[..., V_HEAD_DIM:], latent, rope, **scales)

        return call

    return bind


# ---- Our baseline ----


def _start_baseline(data: input_t) -> Bind:
    from bench.contest import baseline

    config = data[4]
    splits = baseline.splits_for(config["batch_size"], config["kv_seq_len"], processors_of(data[0].device))

    def call(data: input_t) -> output_t:
        q, kv_data, _, kv_indptr, config = data
        return baseline.decode(q, kv_data["bf16"], kv_indptr, config["sm_scale"], splits)

    return lambda data: call


_GET_FLASH_MLA = "pip install --no-deps sgl-flash-mla==1.0.0 (Hopper; runs with torch 2.10 and later)"
_GET_FLASHINFER = (
    "pip install --no-deps flashinfer-python==0.6.18.post1 apache-tvm-ffi==0.1.15.post2, and einops, tabulate, "
    "cuda-bindings, ninja; it compiles with nvcc when first used"
)
YARDSTICK = "FlashMLA fp8"  # the fastest of them, with which the others are compared

PEERS = (
    Peer(
        "flashmla-bf16", "FlashMLA bf16", "a16w16", "flash_mla", "sgl-flash-mla", _GET_FLASH_MLA, _start_flash_mla_bf16
    ),
    Peer("flashmla-fp8", YARDSTICK, "a8w8", "flash_mla", "sgl-flash-mla", _GET_FLASH_MLA, _start_flash_mla_fp8),
    Peer(
        "flashinfer-bf16",
        "FlashInfer fa3 bf16",
        "a16w16",
        "flashinfer",
        "flashinfer-python",
        _GET_FLASHINFER,
        lambda data: _start_flashinfer(data, "bf16"),
        lambda: _build_flashinfer(torch.bfloat16),
    ),
    Peer(
        "flashinfer-fp8",
        "FlashInfer fa3 fp8",
        "a16w8",
        "flashinfer",
        "flashinfer-python",
        _GET_FLASHINFER,
        lambda data: _start_flashinfer(data, "fp8"),
        lambda: _build_flashinfer(FP8),
    ),
    Peer("baseline", "Triton baseline bf16", "a16w16", "triton", "triton", "pip install triton", _start_baseline),
)
