"""What the machine must give before anything heavy starts: a free port, and enough memory."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from freetoken import log
from freetoken.api.listen import bind_sockets
from freetoken.config import Config
from freetoken.errors import ConfigError

GIB = 1 << 30
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""There where NVIDIA's driver is, on Linux and in Windows' subsystem for it."""

_log = log.get(__name__)


def reserve_port(host: str, port: int) -> int:
    """Check that `host:port` can be listened on; returns the port, a free one for 0."""
    sockets = bind_sockets(host, port)
    port = int(sockets[0].getsockname()[1])
    for sock in sockets:
        sock.close()
    return port


def warn_if_open(config: Config) -> None:
    """Anyone who reaches a server without a key may use it."""
    if config.api_key is None and not is_loopback(config.host):
        why = "other machines may use this server without a key"
        remedy = "set FREETOKEN_API_KEY, or --host 127.0.0.1"
        _log.warning(log.event("serve.open", host=config.host, why=why, remedy=remedy))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server on `host`."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found)


def may_use_gpu(config: Config) -> bool:
    """False if the model will run on the CPU for certain. Loads no torch, which would know."""
    return config.device != "cpu" and any(path.exists() for path in GPU_FILES)


def check_memory(weight_bytes: int, available_bytes: int, *, with_gpu: bool) -> None:
    """A first sieve: weights alone must fit; the worker makes the full plan, which is also what
    says `with_gpu` how much of them lies where."""
    if weight_bytes > available_bytes and not with_gpu:
        raise ConfigError(
            f"the weights need {weight_bytes / GIB:.2f} GiB of memory, "
            f"{available_bytes / GIB:.2f} GiB are available (container limits included); "
            "use a smaller model or dtype, or give the machine or container more"
        )
