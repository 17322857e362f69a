"""What the machine must give before anything heavy starts: a free port, and enough memory."""

from __future__ import annotations

import errno
import ipaddress
import socket

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


def check_memory(weight_bytes: int, available_bytes: int) -> None:
    """A first sieve: weights alone must fit; the worker makes the full plan."""
    if weight_bytes > available_bytes:
        raise ConfigError(
            f"the weights need {weight_bytes / GIB:.2f} GiB of memory, "
            f"{available_bytes / GIB:.2f} GiB are available (container limits included); "
            "use a smaller model or dtype, or give the machine or container more"
        )
