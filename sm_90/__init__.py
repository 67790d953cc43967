"""What the submission is given on an NVIDIA H100 or H200, and is never uploaded: a kernel in Gluon (kernel.py), the
runner "wgmma" that launches it (launch.py), and the GPU's dispatch tables (tables.py)."""

import importlib

import torch


def install() -> None:
    """Add the runner, the tables and the architecture to the module `submission`, unless it has them.

    Where Triton is older than 3.6 or missing, an sm_90 GPU gets the table sm_90_plain; plans of the runner "wgmma" are
    refused there by Runner.ready.
    """
    import submission

    if "wgmma" in submission.RUNNERS:
        return
    from sm_90 import launch, tables

    if tables.Plan is not submission.Plan:  # the tools run the submission's file again: its classes are others then
        importlib.reload(launch)
        importlib.reload(tables)
    submission.RUNNERS["wgmma"] = launch.WgmmaRunner()
    submission.TABLES.update(tables.TABLES)
    submission.TABLE_OF_ARCH["sm_90"] = "sm_90" if launch.kernel else "sm_90_plain"


def can_run(device: torch.device) -> bool:
    """Whether plans of the runner "wgmma" run on this device."""
    from sm_90 import launch

    try:
        launch.WgmmaRunner().ready(device)
    except RuntimeError:
        return False
    return True
