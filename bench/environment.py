"""On what something is run: the device by its name, versions, commit."""

import os
import platform
from pathlib import Path

import torch

from bench.basics import PROJECT_ROOT, UserError
from bench.versions import git_commit, version
from portable import choose_aiter
from reference import default_device

_DRIVER_VERSIONS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


def usable_device(name: str | None) -> torch.device:
    """The device of that name, made the current one; by default the GPU if there is one.

    Raises UserError for a device that is unknown or not there.
    """
    try:
        device = torch.device(name) if name is not None else default_device()
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}: expected cpu, cuda or cuda:0, cuda:1, …") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not served: expected cpu, cuda or cuda:0, cuda:1, …")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(
                f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs; try --device cpu"
            )
        torch.cuda.set_device(device.index or 0)
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def device_name(device: torch.device) -> str:
    """The name people know a device by; on ROCm with its architecture, because some drivers name none."""
    if device.type != "cuda":
        return f"{device.type} ({_cpu_model()}, {os.cpu_count()} cores)"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.gcnArchName})" if torch.version.hip else properties.name


def processors_of(device: torch.device) -> int:
    """A GPU's multiprocessors, or compute units."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def describe(device: torch.device) -> dict[str, str | None]:
    """What a result should be kept with; None for what this machine does not have or tell."""
    return {
        "device": device_name(device),
        "driver": _driver() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch": torch.__version__,
        "triton": version("triton"),
        "aiter": _aiter(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git_commit": git_commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _driver() -> str | None:
    return next((path.read_text().strip() for path in _DRIVER_VERSIONS if path.is_file()), None)


def _aiter() -> str:
    """ "portable", or where AMD's is installed."""
    folder = Path(choose_aiter().__file__).resolve().parent
    return "portable" if folder == PROJECT_ROOT / "portable" / "aiter" else str(folder)
