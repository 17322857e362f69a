"""How much host memory the worker may take: free RAM, or less if a cgroup says so.

Called at start, before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

import psutil

MARGIN_RATE = 0.05
"""Share of the free memory left to allocator fragmentation and to the other processes."""
MIN_MARGIN_BYTES = 128 << 20
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
