"""The listening sockets, bound before anything else so that a busy port is known at once."""

from __future__ import annotations

import errno
import socket

from freetoken.errors import ConfigError

BACKLOG = 2048


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Every address of `host` at `port`, the same free port for all if it is 0.

    ConfigError names the address and what to do.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error}") from error
    sockets: list[socket.socket] = []
    unusable: OSError | None = None
    only_v6 = any(entry[0] == socket.AF_INET for entry in found)  # else :: takes IPv4 as well
    for family, kind, proto, _, address in dict.fromkeys(found):
        if port == 0 and sockets:
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        try:
            sockets.append(_bind(family, kind, proto, address, only_v6))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                unusable = error  # for example ::1 where there is no IPv6
                continue
            for sock in sockets:
                sock.close()
            raise ConfigError(_explain(host, port, error)) from error
    if not sockets:
        assert unusable is not None
        raise ConfigError(_explain(host, port, unusable)) from unusable
    return sockets


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(
    family: int, kind: int, proto: int, address: tuple[object, ...], only_v6: bool
) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {host}:{port}: it is in use; stop what listens there or choose "
            "another --port"
        )
    if error.errno == errno.EACCES:
        return f"cannot listen on {host}:{port}: no permission; choose a --port from 1024 on"
    return f"cannot listen on {host}:{port}: {error.strerror}; choose another --host"
