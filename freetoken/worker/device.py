"""The device that computes: which one, and its memory as torch's allocator sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from freetoken import log
from freetoken.errors import ConfigError
from freetoken.worker.budget import GPU_MARGIN_RATE, MIN_GPU_MARGIN_BYTES

MIN_CAPABILITY = (8, 0)
"""bf16 in tensor cores; what cuda/ is compiled for begins here too."""

_log = log.get(__name__)


def find_device(option: str) -> torch.device:
    """The device that --device names; `auto` is the GPU if torch can use one, else the CPU.

    Raises ConfigError if a GPU is asked for that cannot be had.
    """
    if option == "cpu":
        return torch.device("cpu")
    obstacle = _obstacle()
    if obstacle is None:
        # Triton 3.9 warns that its default will change, which is what our kernels are tuned with.
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        return torch.device("cuda", torch.cuda.current_device())
    if option == "cuda":
        raise ConfigError(f"--device cuda: {obstacle}; use --device cpu or auto")
    _log.info(log.event("device.cpu", why=obstacle))
    return torch.device("cpu")


def _obstacle() -> str | None:
    """Why no GPU can be used, or None."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU: is there one, and a driver, and is it visible here?"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return f"the GPU cannot be used: {' '.join(str(error).split())}"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        names = [".".join(map(str, each)) for each in (capability, MIN_CAPABILITY)]
        return f"the GPU has compute capability {names[0]}, the kernels need {names[1]}"
    return None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes. `free`: on the device, for anybody · `reserved`: by torch's allocator ·
    `allocated`: of that, by tensors now · `peak`: the most since the peak was restarted."""

    free: int
    reserved: int
    allocated: int
    peak: int


class DeviceMemory:
    """Memory of a cuda `device`, seen from a moment when nothing of the worker's is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)

    def restart_peak(self) -> None:
        """What was at its peak until now is forgotten; what is there counts."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        free, _ = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            free,
            torch.cuda.memory_reserved(self._device),
            torch.cuda.memory_allocated(self._device),
            torch.cuda.max_memory_allocated(self._device),
        )

    def peak(self) -> int:
        """The most that the worker's tensors have taken."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


def find_spare(now: MemoryReading, budget_bytes: int, reserved_bytes: int) -> int:
    """What is left when steps have run once: beside their peak, `reserved_bytes` for what comes
    later, and the margin of a budget of that size."""
    available = now.free + now.reserved - now.allocated
    margin = max(MIN_GPU_MARGIN_BYTES, int(GPU_MARGIN_RATE * budget_bytes))
    return max(0, available - (now.peak - now.allocated) - reserved_bytes - margin)


def check_prices(peak_bytes: int, prices: dict[str, int]) -> bool:
    """Whether what was measured is within what the plan has priced; a WARNING if not."""
    planned = sum(prices.values())
    fields = {"measured_mib": peak_bytes >> 20, "planned_mib": planned >> 20}
    if peak_bytes <= planned:
        _log.info(log.event("memory.measured", **fields))
        return True
    _log.warning(
        log.event("memory.over", **fields, over_mib=(peak_bytes - planned) >> 20)
        + "; the plan prices something too low, steps may run out of memory"
    )
    return False
