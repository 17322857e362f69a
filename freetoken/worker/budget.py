"""How much memory the worker may take: of the host's, or less if a cgroup says so; of a GPU's.

Called at start, before anything is loaded. Importing it loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

MARGIN_RATE = 0.05
"""Share of the free memory left to allocator fragmentation and to the other processes."""
MIN_MARGIN_BYTES = 128 << 20
GPU_MARGIN_RATE = 0.02
"""Share of a GPU's free memory left to the holes between the allocator's blocks."""
MIN_GPU_MARGIN_BYTES = 256 << 20
GPU_CONTEXT_BYTES = 512 << 20
"""What CUDA keeps for a process before its first tensor, where it cannot be measured."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def measure_budget() -> int:
    """Bytes that this process may still take on this machine, less a margin."""
    free = psutil.virtual_memory().available
    limit = cgroup_free(CGROUP_ROOT, OWN_CGROUPS)
    return budget_of(free if limit is None else min(free, limit))


def budget_of(free_bytes: int) -> int:
    """What is left of `free_bytes` after the margin."""
    return max(0, free_bytes - max(MIN_MARGIN_BYTES, int(free_bytes * MARGIN_RATE)))


def measure_gpu_budget(device: torch.device) -> int:
    """Bytes that tensors may still take on a cuda `device`, less a margin.

    Creates the CUDA context first, whose memory is then no longer free.
    """
    import torch

    with torch.cuda.device(device):
        torch.cuda.init()
        torch.zeros(1, device=device)
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return gpu_budget_of(free + unused)


def gpu_budget_of(free_bytes: int) -> int:
    """What is left of a GPU's `free_bytes` after the margin."""
    return max(0, free_bytes - max(MIN_GPU_MARGIN_BYTES, int(free_bytes * GPU_MARGIN_RATE)))


def card_budget_of(vram_bytes: int) -> int:
    """The budget on a GPU of `vram_bytes` that nothing else uses, without looking at one."""
    return gpu_budget_of(max(0, vram_bytes - GPU_CONTEXT_BYTES))


def cgroup_free(root: Path, own_cgroups: Path) -> int | None:
    """Bytes until the tightest memory limit of our cgroups, None without a limit.

    Every ancestor's limit counts. File pages that the kernel can drop are not use. Versions 1
    and 2 (kernel Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst).
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            base = root
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        # In a container the path may be the host's: then only the root exists here.
        own = base / path.strip("/")
        directories = [own, *own.parents]
        for directory in directories[: directories.index(base) + 1]:
            free = _free_in(directory, *files)
            if free is not None:
                found.append(free)
    return min(found, default=None)


def _free_in(directory: Path, limit_file: str, use_file: str, droppable: str) -> int | None:
    try:
        limit = (directory / limit_file).read_text().strip()
        use = int((directory / use_file).read_text())
        stat = (directory / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    counts = dict(line.split(" ", 1) for line in stat.splitlines())
    return max(0, int(limit) - max(0, use - int(counts.get(droppable, 0))))
