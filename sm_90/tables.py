"""The dispatch tables for sm_90: per shape the fastest plan on an NVIDIA H200 (driver 580.159.04, torch 2.11.0, Triton
3.6.0; L2 flushed, median)."""

from dataclasses import replace

from submission import Plan, Table, Tile

_WGMMA = Tile("fp8", stages=2, merge="kernel")
SM90_TABLE: Table = {
    (4, 1024): Plan("wgmma", num_splits=16, tile=_WGMMA),
    (4, 8192): Plan("wgmma", num_splits=32, tile=_WGMMA),
    (32, 1024): Plan("wgmma", num_splits=4, tile=_WGMMA),
    (32, 8192): Plan("wgmma", num_splits=8, tile=_WGMMA),
    (64, 1024): Plan("wgmma", num_splits=2, tile=_WGMMA),
    (64, 8192): Plan("wgmma", num_splits=4, tile=_WGMMA),
    (256, 1024): Plan("wgmma", num_splits=1, tile=_WGMMA),
    (256, 8192): Plan("wgmma", num_splits=1, tile=_WGMMA),
}

# With the mxfp4 cache, whose error is another: a choice, no default.
SM90_MXFP4_TABLE: Table = {
    shape: replace(plan, tile=replace(plan.tile, cache="mxfp4")) for shape, plan in SM90_TABLE.items()
}
SM90_MXFP4_TABLE[64, 1024] = replace(SM90_MXFP4_TABLE[64, 1024], num_splits=4)

# The submission's own kernel on the same cache, for a Triton that lacks what the other needs.
SM90_PLAIN_TABLE: Table = {
    (4, 1024): Plan("fused", num_splits=16, tile=Tile("fp8", warps=8, merge="kernel")),
    (4, 8192): Plan("fused", num_splits=32, tile=Tile("fp8", merge="kernel")),
    (32, 1024): Plan("fused", num_splits=4, tile=Tile("fp8")),
    (32, 8192): Plan("fused", num_splits=8, tile=Tile("fp8", merge="kernel")),
    (64, 1024): Plan("fused", num_splits=2, tile=Tile("fp8")),
    (64, 8192): Plan("fused", num_splits=4, tile=Tile("fp8")),
    (256, 1024): Plan("fused", num_splits=1, tile=Tile("fp8")),
    (256, 8192): Plan("fused", num_splits=1, tile=Tile("fp8")),
}

# The same on the bf16 cache: the most accurate, bound by memory where the work is large.
SM90_BF16_TABLE: Table = {
    (4, 1024): Plan("fused", num_splits=16, tile=Tile("bf16", block=32, merge="kernel")),
    (4, 8192): Plan("fused", num_splits=32, tile=Tile("bf16", merge="kernel")),
    (32, 1024): Plan("fused", num_splits=4, tile=Tile("bf16")),
    (32, 8192): Plan("fused", num_splits=4, tile=Tile("bf16")),
    (64, 1024): Plan("fused", num_splits=2, tile=Tile("bf16")),
    (64, 8192): Plan("fused", num_splits=2, tile=Tile("bf16")),
    (256, 1024): Plan("fused", num_splits=1, tile=Tile("bf16", block=32)),
    (256, 8192): Plan("fused", num_splits=1, tile=Tile("bf16")),
}

TABLES: dict[str, Table] = {
    "sm_90": SM90_TABLE,
    "sm_90_bf16": SM90_BF16_TABLE,
    "sm_90_mxfp4": SM90_MXFP4_TABLE,
    "sm_90_plain": SM90_PLAIN_TABLE,
}
