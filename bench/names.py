"""The names that the command line takes and completes, as text: what they stand for loads torch, --help does not.

tests/bench/test_names.py holds each equal to what it names.
"""

TABLES = ("gfx950", "gfx950_fused", "gfx950_fused_mxfp4", "v50", "sm_90", "sm_90_bf16", "sm_90_mxfp4", "sm_90_plain")
SHAPES = ("4x1024", "4x8192", "32x1024", "32x8192", "64x1024", "64x8192", "256x1024", "256x8192")  # task.BENCHMARKS
CHECKS = ("exact", "tokens", "strays", "fresh", "hard", "deterministic", "inputs", "upload")
PEERS = ("flashmla-bf16", "flashmla-fp8", "flashinfer-bf16", "flashinfer-fp8", "baseline")
