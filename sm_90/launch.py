"""The runner "wgmma": how the kernel for sm_90 is planned and launched, as a FusedRunner of the submission's."""

import functools
import math

import torch

from submission import FusedRunner, Launch, Plan, Problem

try:
    import triton
except ImportError:
    triton = None
try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from sm_90 import kernel
except (ImportError, AttributeError):  # Triton is missing, or older than 3.6
    kernel = None

_GROUPS = {"fp8": 2, "mxfp4": 4}  # dims in two bytes of the cache


class WgmmaRunner(FusedRunner):
    """bf16 q on the fp8 or mxfp4 cache of an sm_90 GPU; several splits are merged by a second kernel."""

    first_kernel = "_wgmma_kernel"
    choices = FusedRunner.choices | {"cache": tuple(_GROUPS), "block": (64,), "warps": (4,), "merge": ("kernel",)}

    def target(self, device: torch.device) -> str:
        """Raises RuntimeError on another GPU, and without a Triton that has what the kernel needs."""
        _check_device(device)
        return "nvidia"

    def decode(self, problem: Problem, plan: Plan, target: str, cache: torch.Tensor, shared: dict) -> Launch:
        """Raises ValueError for another target than "nvidia" and for another output than bfloat16."""
        dtype = shared["out_ptr"].dtype
        if target != "nvidia" or dtype != torch.bfloat16:
            raise ValueError(f"the runner 'wgmma' is for nvidia and a bfloat16 output, got {target} and {dtype}")
        rows = cache.view(-1, cache.shape[-1])
        blocks = TensorDescriptor.from_tensor(rows, [64, 64], kernel.BLOCK_LAYOUT)
        constants = {
            "GROUPS": _GROUPS[plan.tile.cache],
            "STAGES": plan.tile.stages,
            "SPLIT": plan.num_splits > 1,
            "ALIGN": math.gcd(shared["scale_row"], 8),
        }
        grid, arguments = (plan.num_splits, problem.batch_size), {"q_ptr": problem.q, "cache": blocks, **shared}
        return Launch(kernel._wgmma_kernel, grid, arguments, constants, {"num_warps": plan.tile.warps})


@functools.lru_cache(maxsize=64)
def _check_device(device: torch.device) -> None:
    on_cuda = device.type == "cuda" and not torch.version.hip
    if kernel is None or not on_cuda or torch.cuda.get_device_capability(device) != (9, 0):
        found = f"Triton {triton.__version__}" if triton else "no Triton"
        raise RuntimeError(
            f"the runner 'wgmma' needs an sm_90 GPU and Triton 3.6 or later; this is {device} with {found}. "
            "Use the runner 'fused', such as by the table sm_90_plain"
        )
