"""The plans that tests of custom_kernel go through: two or more of every runner, and how a test names one."""

import submission
from submission import Plan
from tests.conftest import HOPPER
from tests.ragged import fused_plan

ON_AITER = [
    Plan("bf16"),
    Plan("bf16", num_splits=3),
    Plan("fp8_nonpersistent", num_splits=1),
    Plan("fp8_nonpersistent", num_splits=3),
    Plan("a16w8_persistent", num_splits=1),
    Plan("a16w8_persistent", num_splits=4),
    Plan("a8w8_persistent", num_splits=1),
    Plan("a8w8_persistent", num_splits=4),
]
FUSED = [
    fused_plan("bf16", 3, 64),
    fused_plan("bf16", 8, 32, "kernel"),
    fused_plan("fp8", 1, 64),
    fused_plan("fp8", 4, 64),
    fused_plan("fp8", 16, 64, "kernel", warps=8),
    fused_plan("mxfp4", 2, 64),
    fused_plan("mxfp4", 4, 64, "kernel"),
]
if HOPPER:
    FUSED += [
        Plan("wgmma", splits, tile=submission.TABLES[table][4, 1024].tile)
        for table in ("sm_90", "sm_90_mxfp4")
        for splits in (1, 3, 40)
    ]


def name_of(plan: Plan) -> str:
    """As in "bf16-3" or "fused-8-fp8-kernel"."""
    tile = f"-{plan.tile.cache}-{plan.tile.merge}" if plan.tile else ""
    return f"{plan.runner}-{plan.num_splits}{tile}"
