"""What the machine must give before anything heavy starts: a free port, and enough memory."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path

from freetoken.errors import ConfigError

GIB = 1 << 30


def reserve_port(host: str, port: int) -> int:
    """Check that `host:port` can be listened on; returns the port, a free one for 0."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is no address: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        # as servers do: a port in TIME_WAIT after a restart is free, one with a listener is not
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise ConfigError(_explain_bind(host, port, error)) from error
        return int(probe.getsockname()[1])


def _explain_bind(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another process; give another --port, or 0"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; give a --port of 1024 or more"
    return f"cannot listen on {host}:{port}: {error.strerror}"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server on `host`."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found)


# ---------------------------------------------------------------- memory


def check_memory(weight_bytes: int, available_bytes: int) -> None:
    """A first sieve: weights alone must fit; the worker makes the full plan."""
    if weight_bytes > available_bytes:
        raise ConfigError(
            f"the weights need {weight_bytes / GIB:.2f} GiB of memory, "
            f"{available_bytes / GIB:.2f} GiB are available (container limits included); "
            "use a smaller model or dtype, or give the machine or container more"
        )


def has_gpu() -> bool:
    """True if an NVIDIA driver is loaded; asks no CUDA library."""
    return os.path.exists("/dev/nvidiactl")


def read_available_bytes(
    root: Path = Path("/"), psutil_bytes: Callable[[], int] | None = None
) -> int:
    """Memory this process may still take: the machine's, or less if a cgroup limits it."""
    return min([(psutil_bytes or _machine_bytes)(), *_cgroup_rooms(root)])


def _machine_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _cgroup_rooms(root: Path) -> list[int]:
    """Limit minus use (page cache not counted), for our cgroup and all above it, v2 and v1."""
    rooms = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mount = root / "sys/fs/cgroup"
            if controllers == "":
                names = ("memory.max", "memory.current", "inactive_file ")
            elif "memory" in controllers.split(","):
                mount /= "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
            else:
                continue
            group = mount / path.lstrip("/")
            # inside a container the path is the host's and the mount shows our group at its top
            for directory in {mount, group, *group.parents}:
                if directory == mount or mount in directory.parents:
                    rooms += _room(directory, *names)
    return rooms


def _room(directory: Path, limit: str, use: str, cache: str) -> list[int]:
    try:
        limit_bytes = int((directory / limit).read_text())
        used_bytes = int((directory / use).read_text())
        lines = (directory / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or "max"
        return []
    cached = [int(line.removeprefix(cache)) for line in lines if line.startswith(cache)]
    return [max(0, limit_bytes - max(0, used_bytes - sum(cached)))]
